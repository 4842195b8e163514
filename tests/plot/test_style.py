"""The module as a whole: no display, no global state, files that are whole or not there."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt import plot
from headtilt.plot import style
from headtilt.plot.explain import answered
from headtilt.plot.style import pixels_of
from tests.toys import ungated

from .toys import LEVELS, NAMES, network, pictures


class TestTheModule:
    def test_importing_it_does_not_import_matplotlib_and_using_it_does_not_import_pyplot(self):
        code = (
            "import sys, headtilt.plot as plot\n"
            "assert 'matplotlib' not in sys.modules\n"
            "plot.bars({'a': {'accuracy': 0.5}}, title='t')\n"
            "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_without_matplotlib_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ht.MissingExtraError, match=r"matplotlib .* pip install 'headtilt\[plot\]'"):
            plot.bars({"a": {"accuracy": 0.5}}, title="t")

    def test_drawing_leaves_the_style_of_the_caller_alone(self, result):
        import matplotlib

        before = dict(matplotlib.rcParams)
        plot.before_after(result)
        plot.tree(result)
        assert dict(matplotlib.rcParams) == before


class TestSave:
    @pytest.fixture
    def figure(self):
        return plot.bars({"a": {"accuracy": 0.5}}, title="t")

    def test_png_and_svg_are_written_into_a_new_folder_and_nothing_else_is(self, figure, tmp_path):
        png = plot.save(figure, tmp_path / "new" / "deep" / "picture.PNG")
        svg = plot.save(figure, os.fspath(tmp_path / "new" / "deep" / "picture.svg"))
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in svg.read_text(encoding="utf-8")
        assert sorted(path.name for path in png.parent.iterdir()) == ["picture.PNG", "picture.svg"]

    def test_the_picture_has_150_dots_per_inch(self, figure, tmp_path):
        path = plot.save(figure, tmp_path / "picture.png")
        width, height = (int.from_bytes(path.read_bytes()[start : start + 4], "big") for start in (16, 20))
        assert (width, height) == (7 * 150, round((0.95 + 0.36) * 150 - 0.01))

    def test_the_old_picture_is_replaced_at_once_and_not_written_over(self, figure, tmp_path):
        (tmp_path / "picture.png").write_bytes(b"old")
        os.link(tmp_path / "picture.png", tmp_path / "other name of the old one")
        plot.save(figure, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "other name of the old one").read_bytes() == b"old"

    def test_a_failure_leaves_the_old_picture_and_no_remains(self, figure, tmp_path, monkeypatch):
        path = tmp_path / "picture.png"
        path.write_bytes(b"old")

        def fail(target, **options):
            target.write_bytes(b"half a pict")
            raise OSError("disk full")

        monkeypatch.setattr(figure, "savefig", fail)
        with pytest.raises(OSError, match="disk full"):
            plot.save(figure, path)
        assert path.read_bytes() == b"old"
        assert [one.name for one in tmp_path.iterdir()] == ["picture.png"]

    @pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.png.gz"])
    def test_another_suffix_is_an_error_and_makes_no_folder(self, figure, tmp_path, name):
        with pytest.raises(ht.OptionError, match=r"path must end in \.png or \.svg; got 'picture"):
            plot.save(figure, tmp_path / "new" / name)
        assert not (tmp_path / "new").exists()


def test_pixels_within_0_and_1_are_shown_as_they_are_and_others_are_scaled():
    grey = torch.tensor([[0.2, 0.6]])[None, None]
    np.testing.assert_allclose(pixels_of(grey)[0, 0], [[0.2] * 3, [0.6] * 3], rtol=1e-6)
    np.testing.assert_allclose(pixels_of(grey * 10 - 4)[0, 0], [[0] * 3, [1] * 3], atol=1e-6)
    colour = torch.rand(2, 3, 4, 5)
    np.testing.assert_allclose(pixels_of(colour), colour.permute(0, 2, 3, 1), rtol=1e-6)
    assert pixels_of(torch.rand(1, 4, 2, 2)).shape == (1, 2, 2, 3)


class TestOneColourPerLabel:
    def test_no_colour_is_given_twice_and_the_seventh_label_has_none(self):
        found = style.label_colours([7, 1, 13, 0, 2, 3, 40, 41])
        assert list(found) == [7, 1, 13, 0, 2, 3]
        assert len(set(found.values())) == 6

    @pytest.mark.parametrize("search", ["tree", "joint"])
    def test_all_parts_of_an_explanation_agree_on_it(self, search):
        from matplotlib.colors import to_hex

        robust = ungated(network(), LEVELS[:1], search=search)
        figure = plot.explain(robust, robust.search(pictures()[:1]), names=NAMES)
        strip = next(axes for axes in figure.axes if [tick.get_text() for tick in axes.get_yticklabels()] == ["label"])
        seen = robust.model(
            ht.warp(pictures()[:1], ht.rotation().orbit(72).float(), padding="auto", interpolation="bicubic")
        ).argmax(-1)
        changed = [place for place in range(72) if place == 0 or seen[place] != seen[place - 1]]
        stripes = {NAMES[seen[at]]: to_hex(bar.get_facecolor()) for at, bar in zip(changed, strip.patches, strict=True)}
        if search == "joint":
            cloud = next(axes for axes in figure.axes if axes.get_ylabel() == "confidence")
            points = {one.get_label(): to_hex(one.get_facecolor()[0]) for one in cloud.collections}
        else:
            drawn = [text for axes in figure.axes for text in axes.texts]
            badges = [text for text in drawn if text.get_text() == "H0"]
            points = {
                NAMES[int(robust.search(pictures()[:1]).labels[0])]: to_hex(badges[0].get_bbox_patch().get_facecolor())
            }
        shared = points.keys() & stripes.keys()
        assert shared
        assert all(points[name] == stripes[name] for name in shared)

    def test_views_that_were_never_shown_are_not_drawn(self):
        robust = ungated(network(), LEVELS[:1], search="joint")
        result = robust.search(pictures()[:1])
        trace = result.trace[0]
        labels, confidence = trace.labels.clone(), trace.confidence.clone()
        labels[0, ::3], confidence[0, ::3] = -1, -math.inf
        result = replace(result, trace=(replace(trace, labels=labels, confidence=confidence),))
        cloud = plot.views(result, 0, names=NAMES).axes[0]
        left = int((labels >= 0).sum())
        assert cloud.get_title(loc="left") == f"{left} views seen"
        assert sum(len(points.get_offsets()) for points in cloud.collections) == left
        assert -1 not in answered(result)

    def test_words_and_pictures_have_one_sign(self):
        robust = ungated(network(), LEVELS[:1])
        result = robust.search(pictures()[:1])
        turn = round(math.degrees(float(ht.decompose(result.perturbation.double()).rotation[0])))
        assert turn
        figure = plot.explain(robust, result)
        said = [text.get_text() for axes in figure.axes for text in axes.texts]
        back = f"{-turn:+d}°".replace("-", "−")
        assert f"turned back\nby {back}" in said
        assert f" found: turned back by {back} " in said
        assert result.describe(0).startswith(f"turned by {turn:+d}".replace("-", "−")[:12])
