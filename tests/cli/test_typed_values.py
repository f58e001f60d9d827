"""Commands that have loaded the code of the application print typed values as JSON."""

import json
from pathlib import Path

from pydantic import BaseModel

from perdure.cli.output import print_json, short


class Quote(BaseModel):
    price: int


def test_typed_values_are_printed_as_json(capsys):
    value = {"quote": Quote(price=1), "paths": [Path("/a")]}
    plain = {"quote": {"price": 1}, "paths": ["/a"]}
    assert json.loads(short(value)) == plain
    print_json(value)
    assert json.loads(capsys.readouterr().out) == plain
