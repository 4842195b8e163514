"""Folders, globs, parquet files and WebDataset tars list their inputs in a stable order and give their bytes back."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from headtilt.apps.batch.inputs import BROKEN, Input, listed, payloads
from headtilt.errors import DataError, OptionError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def contents(inputs):
    return [
        payload if isinstance(payload, (bytes, DataError)) else payload.read_bytes() for _, payload in payloads(inputs)
    ]


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "a.jpg", "deep/c.PNG", "notes.txt"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "images"


def test_a_folder_gives_its_images_sorted_and_nothing_else(folder):
    names = [item.path.removeprefix(f"{folder}/") for item in listed(str(folder))]
    assert names == ["a.jpg", "b.png", "deep/c.PNG"]
    assert contents(listed(str(folder))) == [b"a.jpg", b"b.png", b"deep/c.PNG"]


def test_a_glob_gives_what_it_matches_sorted(folder):
    assert [item.path for item in listed(str(folder / "**/*.[pP][nN][gG]"))] == [
        str(folder / "b.png"),
        str(folder / "deep/c.PNG"),
    ]


def test_output_inside_the_source_is_left_out(folder):
    assert len(listed(str(folder), leave_out=folder / "deep")) == 2


def test_nothing_found_is_an_error_that_names_the_source(tmp_path):
    with pytest.raises(OptionError, match=r"nothing was found at '.*nowhere\*'"):
        listed(str(tmp_path / "nowhere*"))


@pytest.mark.parametrize("shape", ["bytes", "struct"])
def test_parquet_gives_bytes_by_row_across_row_groups(tmp_path, shape):
    cells = [f"picture {number}".encode() for number in range(7)]
    column = cells if shape == "bytes" else [{"bytes": cell, "path": None} for cell in cells]
    path = tmp_path / "some.parquet"
    parquet.write_table(arrow.table({"label": [0] * 7, "image": column}), path, row_group_size=3)
    inputs = listed(str(path))
    assert [item.path for item in inputs] == [f"{path}#{row}" for row in range(7)]
    assert contents(inputs[2:5]) == cells[2:5]
    assert contents(inputs) == cells


def test_a_row_without_bytes_is_read_from_its_path_or_has_an_error(tmp_path):
    (tmp_path / "x.png").write_bytes(b"from disk")
    cells = [{"bytes": None, "path": "x.png"}, {"bytes": None, "path": None}]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(arrow.table({"image": arrow.array(cells, kind)}), tmp_path / "some.parquet")
    first, second = contents(listed(str(tmp_path / "some.parquet")))
    assert first == b"from disk"
    assert str(second) == "the row holds no image."


def test_parquet_of_paths_is_relative_to_its_own_folder(tmp_path, folder):
    parquet.write_table(arrow.table({"path": ["images/b.png", None, "images/a.jpg"]}), tmp_path / "list.parquet")
    inputs = listed(str(tmp_path / "list.parquet"))
    assert inputs[0].path == str(folder / "b.png")
    found = contents(inputs)
    assert (found[0], found[2]) == (b"b.png", b"a.jpg")
    assert str(found[1]) == "the row names no file."


def test_a_parquet_file_whose_column_cannot_be_told_names_its_columns(tmp_path):
    parquet.write_table(arrow.table({"caption": ["x"], "n": [1]}), tmp_path / "some.parquet")
    with pytest.raises(OptionError, match=r"it has caption, n\. Name it with --column"):
        listed(str(tmp_path / "some.parquet"))
    assert len(listed(str(tmp_path / "some.parquet"), column="caption")) == 1
    with pytest.raises(OptionError, match="column must be one of caption"):
        listed(str(tmp_path / "some.parquet"), column="n")


def test_a_broken_parquet_file_is_one_input_with_an_error_and_others_go_on(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    parquet.write_table(arrow.table({"image": [b"fine"]}), tmp_path / "b.parquet")
    inputs = listed(str(tmp_path))
    assert [item.place for item in inputs] == [BROKEN, 0]
    found = contents(inputs)
    assert "a.parquet is not a readable parquet file" in str(found[0])
    assert found[1] == b"fine"


def test_a_tar_gives_one_input_for_each_sample(tmp_path):
    files = {"001.jpg": b"one", "001.cls": b"3", "002.cls": b"4", "x/003.seg.png": b"three", "x/003.json": b"{}"}
    write_tar(tmp_path / "s.tar", files)
    inputs = listed(str(tmp_path / "s.tar"))
    assert [item.path.rpartition("#")[2] for item in inputs] == ["001.jpg", "002", "x/003.seg.png"]
    found = contents(inputs)
    assert (found[0], found[2]) == (b"one", b"three")
    assert str(found[1]) == "the sample holds no image."


def test_what_the_webdataset_library_writes_is_read(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with open(tmp_path / "s-000.tar", "wb") as stream, webdataset.TarWriter(stream) as sink:
        for number in range(3):
            sink.write({"__key__": f"sample{number}", "png": f"bytes {number}".encode(), "cls": number})
    assert contents(listed(str(tmp_path / "s-{000..000}.tar"))) == [b"bytes 0", b"bytes 1", b"bytes 2"]
    with pytest.raises(DataError, match=r"s-001\.tar, which does not exist"):
        listed(str(tmp_path / "s-{000..001}.tar"))


def test_a_tar_that_was_cut_off_gives_what_is_whole_and_an_error_for_the_rest(tmp_path):
    write_tar(tmp_path / "whole.tar", {"1.png": b"a" * 600, "2.png": b"b" * 5000})
    (tmp_path / "cut.tar").write_bytes((tmp_path / "whole.tar").read_bytes()[:3000])
    found = contents(listed(str(tmp_path / "cut.tar")))
    assert found[0] == b"a" * 600
    assert all(isinstance(other, DataError) for other in found[1:])
    assert len(found) >= 2


def test_a_compressed_tar_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "s.tar.gz").write_bytes(b"")
    with pytest.raises(OptionError, match="Unpack it"):
        listed(str(tmp_path / "s.tar.gz"))


def test_files_that_vanish_after_listing_are_errors_for_each_of_their_rows(tmp_path):
    write_tar(tmp_path / "s.tar", {"1.png": b"a"})
    gone = [Input("p", str(tmp_path / "gone.parquet"), 0, column="image"), Input("t", str(tmp_path / "gone.tar"), 0, 1)]
    assert all(isinstance(payload, DataError) for payload in contents(gone))


def test_a_file_whose_name_is_not_utf8_is_one_input_with_an_error(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"bad\xff.png")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system refuses such names")
    (item,) = listed(str(tmp_path))
    assert item.path.endswith("bad\\xff.png")
    assert "not UTF-8" in str(contents([item])[0])
