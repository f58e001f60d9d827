"""pydantic models, alone and inside everything else; and no pydantic where nobody uses it."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, SecretStr, computed_field, field_validator

from perdure.codec import JSON, MSGPACK, fingerprint
from perdure.errors import InvalidPayload
from tests.codec.sample_types import Order

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
NOW = datetime(2024, 1, 1, tzinfo=UTC)


class Item(BaseModel):
    name: str
    price: Decimal
    when: datetime = NOW


class Twin(BaseModel):
    name: str
    price: Decimal
    when: datetime = NOW


class Basket(BaseModel):
    items: list[Item]
    best: Item | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    when: datetime
    tags: frozenset[str]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def year(self) -> int:
        return self.when.year


class Aliased(BaseModel):
    full_name: str = Field(alias="fullName")


class Ids(RootModel[list[int]]):
    pass


class Guarded(BaseModel):
    password: SecretStr


class Even(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


@dataclass
class Holder:
    item: Item
    more: dict[str, list[Item]]
    one: Item | Twin | int


ITEM = Item(name="tea", price=Decimal("1.50"))
TWIN = Twin(name="tea", price=Decimal("1.50"))


@both
@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (ITEM, Item),
        (ITEM, Item | None),
        (ITEM, Item | int),
        (ITEM, Item | Twin),
        (TWIN, Item | Twin),
        (TWIN, Twin | Order | dict[str, Any]),
        ([ITEM], list[Item]),
        ({"a": [ITEM, ITEM]}, dict[str, list[Item]]),
        (Basket(items=[ITEM], best=ITEM), Basket),
        (Holder(ITEM, {"a": [ITEM]}, TWIN), Holder),
        (Strict(when=NOW, tags=frozenset({"a"})), Strict),
        ([Strict(when=NOW, tags=frozenset({"a"}))], list[Strict | Item]),
        (Aliased(fullName="Ada"), Aliased),
        (Ids([1, 2]), Ids),
        (Ids([1, 2]), Ids | Item),
        (Even(n=2), Even),
    ],
    ids=str,
)
def test_round_trip(codec, value, annotation):
    back = codec.decode(codec.encode(value, annotation), annotation)
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, Holder):
        assert type(back.one) is Twin


@both
def test_model_without_annotation_is_decoded_as_its_dump(codec):
    assert codec.decode(codec.encode({"x": ITEM})) == {"x": ITEM.model_dump(mode="json")}


@both
def test_model_is_validated_when_decoded(codec):
    with pytest.raises(InvalidPayload, match=r"^value: n: .*must be even"):
        codec.decode(codec.encode({"n": 3}), Even)
    with pytest.raises(InvalidPayload, match=r"^value: a\[1\]\.n: .*must be even"):
        codec.decode(codec.encode({"z": [], "a": [{"n": 2}, {"n": 3}]}), dict[str, list[Even]])
    with pytest.raises(InvalidPayload, match=r"^value: items\[0\]\.price: "):
        codec.decode(codec.encode({"items": [{"name": "a", "price": "x"}]}), Basket)


@both
def test_invalid_model_is_rejected_when_encoded(codec):
    changed = Even(n=2)
    changed.n = 3
    with pytest.raises(InvalidPayload, match=r"^value: \[0\]\.n: .*must be even"):
        codec.encode([changed], list[Even])


@both
def test_value_that_a_dump_loses_is_rejected(codec):
    with pytest.raises(InvalidPayload, match=r"password: .*would be decoded as"):
        codec.encode(Guarded(password=SecretStr("hunter2")), Guarded)


@both
def test_other_model_with_the_same_fields_is_rejected(codec):
    with pytest.raises(InvalidPayload, match="Expected `Item`, got `Twin`"):
        codec.encode([TWIN], list[Item])


def test_json_rejects_nan_in_a_model():
    class Weight(BaseModel):
        kg: float
        note: str | None = None

    with pytest.raises(InvalidPayload, match=r"kg.*nan cannot be encoded as JSON"):
        JSON.encode(Weight(kg=float("nan")), Weight)


def test_models_have_a_fingerprint():
    assert fingerprint(JSON, (ITEM,), {}) == fingerprint(JSON, (ITEM.model_copy(),), {})
    assert fingerprint(JSON, (ITEM,), {}) != fingerprint(JSON, (ITEM.model_copy(update={"name": "x"}),), {})


def test_importing_and_using_the_codec_does_not_import_pydantic():
    program = (
        "import sys, dataclasses\n"
        "from perdure.codec import JSON\n"
        "import perdure.codec.parameters\n"
        "A = dataclasses.make_dataclass('A', [('x', int)])\n"
        "assert JSON.decode(JSON.encode(A(1), A), A) == A(1)\n"
        "try: JSON.encode(object())\n"
        "except Exception as error: assert 'cannot be encoded' in str(error)\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
