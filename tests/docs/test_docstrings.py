"""Every example in a docstring runs, and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from PIL import Image

import headtilt

SOURCE = Path(headtilt.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(("headtilt", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_no_example_is_skipped():
    assert len(WITH_EXAMPLES) >= 3
    for path in SOURCE.rglob("*.py"):
        assert "doctest: +SKIP" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_they_say(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28), 128).save("digit.png")
    given = {}
    if name.endswith("pipeline"):
        transformers = pytest.importorskip("transformers", reason="needs the extra headtilt[hf]")
        shape = {"image_size": 28, "patch_size": 14, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**shape, num_attention_heads=2))
        processor = transformers.ViTImageProcessor(size={"height": 28, "width": 28})
        given = {"model": model.eval(), "processor": processor, "robust": headtilt.ITS(model)}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    examples = [test for test in finder.find(module, extraglobs=given) if test.examples]
    assert examples
    for test in examples:
        assert runner.run(test).failed == 0, test.name
