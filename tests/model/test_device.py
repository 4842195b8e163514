"""Devices by name, and threads."""

from __future__ import annotations

import pytest
import torch

from headtilt.errors import OptionError
from headtilt.model import device


def test_auto_is_a_device_that_is_there():
    assert device.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.resolve_device("cpu") == "cpu"
    with pytest.raises(OptionError, match="got 'magic'"):
        device.resolve_device("magic")


def test_threads_are_no_more_than_idle_cores(monkeypatch):
    asked = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for busy in (0, 2, 9):
        monkeypatch.setattr(device, "running_elsewhere", lambda busy=busy: busy)
        device.limit_threads()
    assert asked == [4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    device.limit_threads()
    assert asked == [4, 2, 1]


@pytest.mark.parametrize(
    ("content", "count"), [("1.29 1.77 1.72 1/345 99", 0), ("0 0 0 4/345 99", 3), ("0 0 0", 0), ("a b c d/e", 0)]
)
def test_what_ended_a_minute_ago_does_not_count_as_running(tmp_path, content, count):
    file = tmp_path / "loadavg"
    file.write_text(content, encoding="ascii")
    assert device.running_elsewhere(file) == count
    assert device.running_elsewhere(tmp_path / "nothing") == 0
