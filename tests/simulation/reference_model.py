"""The reference model: what a run comes to, as far as that does not depend on the order in which the world answers."""

from typing import Any

from tests.simulation.random_programs import CHILDREN, Node
from tests.simulation.workflows import goes_over

Expected = tuple[str, Any] | None
"""("value", what it returns), ("error", the type of what it raises), or None where it depends."""

LIMITED = ("sim.hasty", "sim.restless")  # these may come to a TimeoutError instead


def expected_of_run(parts: list[Node], flow: str = "sim.tree", *, limits: bool = True) -> Expected:
    """How a run comes out. With `limits`, one that may be stopped by a limit of its own depends on the time."""
    if limits and flow in LIMITED:
        return None
    if flow == "sim.gated":
        outcome = _expected_of_parts("seq", [expected(parts[0], flow), expected(parts[-1], flow)])
        return outcome if outcome is None or outcome[0] == "error" else ("value", ["gate", *outcome[1]])
    return _expected_of_all(parts, flow)


def _expected_of_all(parts: list[Node], flow: str) -> Expected:
    """Of several trees only the last one's value is seen, if none before it fails."""
    value, began_as = None, flow
    for number, part in enumerate(parts):
        outcome = expected(part, flow, first=number == 0)
        if began_as == "sim.patient" and outcome != expected(part, began_as, first=number == 0):
            return None  # it went over, and its steps may have been mended before
        if outcome is not None and outcome[0] == "error" and flow == "sim.again":
            outcome = expected(part, flow, first=False)  # tried again, as a new generation
        if outcome is None or outcome[0] == "error":
            return outcome
        value = outcome[1]
        if number + 1 < len(parts) and goes_over(part):
            flow = "sim.tree"
    if flow == "sim.grown" and len(parts) > 1:  # each continuation is of the newest version
        value = ["version 2", 1, value]
    return ("value", value)


def expected(node: Node, flow: str = "sim.tree", first: bool = True) -> Expected:
    """What one tree comes to in a run of this workflow; `first`: in its first generation."""
    kind, n, parts = node
    match kind:
        case "ok" | "slow" | "flaky" | "chance" | "wrote" | "stubborn":
            return ("value", n)
        case "undone":
            return ("value", n)  # the behaviours that it can have come to a good end
        case "fails" | "hangs":
            return ("value", n) if flow == "sim.patient" else ("error", "StepFailed")  # held until it is mended
        case "lately":
            return ("value", n) if flow == "sim.patient" or not first else ("error", "StepFailed")
        case "sleep" | "until" | "show" | "stream" | "register" | "send" | "broadcast" | "detached":
            return ("value", None)
        case "raise":
            return ("error", "LookupError")
        case "map":
            return ("value", list(range(n)))
        case "seq" | "scope" | "join" | "gather":
            return _expected_of_parts(kind, [expected(part, flow, first) for part in parts])
        case "loop":
            return _expected_of_loop(n, expected(parts[0], flow, first))
        case "child" | "started":
            return _expected_of_child(kind, expected_of_run(parts, CHILDREN[n % len(CHILDREN)]))
        case _:
            return None


def _expected_of_parts(kind: str, outcomes: list[Expected]) -> Expected:
    values = []
    for outcome in outcomes:
        if outcome is None:
            return None
        if outcome[0] == "error":
            if kind in ("gather", "join") and None in outcomes:
                return None
            if kind == "gather" and len({each for each in outcomes if each is not None and each[0] == "error"}) > 1:
                return None
            return {"seq": outcome, "gather": outcome, "scope": ("value", outcome[1])}.get(kind, ("value", "JoinError"))
        values.append(outcome[1])
    return ("value", values)


def _expected_of_loop(n: int, outcome: Expected) -> Expected:
    if outcome is None:
        return None
    return ("value", outcome[1]) if outcome[0] == "error" else ("value", [n, outcome[1]])


def _expected_of_child(kind: str, outcome: Expected) -> Expected:
    if outcome is None:
        return None
    if kind == "child":
        return ("error", "ChildFailed") if outcome[0] == "error" else outcome
    return ("value", ["failed", None] if outcome[0] == "error" else ["succeeded", outcome[1]])


def depends_on_generation(node: Node) -> bool:
    """Whether it comes out differently in a first generation: a copy of a run is none."""
    return bool(node[0] == "lately") or any(depends_on_generation(part) for part in node[2])
