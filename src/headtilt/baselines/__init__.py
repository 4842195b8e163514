"""What ITS is compared with."""
