"""Folders and tables of images, labelled in one go."""
