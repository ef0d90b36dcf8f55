"""Runs the command line inside the test's process: what a user types, without a second interpreter."""

import json
import sys
from typing import NamedTuple

import pytest

from dsv4kv_jax.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        assert self.err == ""
        return json.loads(self.out)


def run(capsys, monkeypatch, *args) -> Outcome:
    monkeypatch.setattr(sys, "argv", ["dsv4kv", *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    return Outcome(code=int(exit_.value.code or 0), out=out, err=err)
