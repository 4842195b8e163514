from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headtilt.errors import DataError, OptionError
from headtilt.paper.data import siscore

WriteImage = Callable[..., Path]


@pytest.mark.parametrize(
    ("variant", "place"),
    [
        ("rotation", "rotation"),
        ("rotation", "si-score/object_rotation"),
        ("area", "si_area"),
        ("area", "object_size"),
        ("location", "location20_area02_min0pc"),
    ],
)
def test_a_variant_is_found_under_its_published_names_with_imagenet_labels(
    tmp_path: Path, write_image: WriteImage, variant: str, place: str
) -> None:
    write_image(tmp_path / place / "zebra" / "17.jpg", size=(20, 20))
    write_image(tmp_path / place / "bagel" / "4.jpg", size=(20, 20))
    (tmp_path / place / "metadata.csv").write_text("image_id,x_coord\n")
    data = siscore.read(variant, folders=tmp_path, size=16)  # type: ignore[arg-type]
    assert data.labels.tolist() == [931, 340]
    assert data.images.shape == (2, 3, 16, 16)
    assert len(data.classes) == 1000
    assert (data.classes[340], data.classes[341], data.classes[0]) == ("zebra", "pig", "0")
    assert len(siscore.read(variant, folders=tmp_path, size=16, limit=1)) == 1  # type: ignore[arg-type]


def test_all_61_published_classes_have_distinct_labels() -> None:
    assert len(siscore.LABELS) == len(set(siscore.LABELS.values())) == 61


def test_classes_of_a_generated_set_come_from_its_own_table(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "rotation" / "hot dog" / "1.jpg")
    with pytest.raises(DataError, match="hot dog is not a class of SI-Score"):
        siscore.read(folders=tmp_path)
    (tmp_path / "rotation" / "foreground_classes.csv").write_text("int,label\n934,hot dog\n")
    assert siscore.read(folders=tmp_path, size=8).labels.tolist() == [934]
    (tmp_path / "rotation" / "foreground_classes.csv").write_text("hot dog\n")
    (tmp_path / "rotation" / "foreground_classes.csv").write_text("name\nhot dog\n")
    with pytest.raises(DataError, match="must have the columns int and label"):
        siscore.read(folders=tmp_path)


def test_a_variant_that_is_not_there_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"SI-Score \(area\) was not found\. Put the folder 'area'"):
        siscore.read("area", folders=tmp_path)
    with pytest.raises(OptionError, match="variant must be one of"):
        siscore.read("size")  # type: ignore[arg-type]
