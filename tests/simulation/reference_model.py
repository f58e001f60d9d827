"""The reference model: the outcome of a run, if it does not depend on the order of external events."""

from typing import Any

from tests.simulation.random_programs import CHILDREN, Node
from tests.simulation.workflows import continues_as_tree

Expected = tuple[str, Any] | None
"""("value", the returned value), ("error", the type of the raised error), or None if the order decides."""

LIMITED = ("sim.hasty", "sim.restless")  # may end with a TimeoutError instead


def expected_of_run(parts: list[Node], flow: str = "sim.tree", *, limits: bool = True) -> Expected:
    """Return the outcome of a run. With `limits`, the outcome of a run that a limit may stop is None."""
    if limits and flow in LIMITED:
        return None
    if flow == "sim.gated":
        outcome = _expected_of_parts("seq", [expected(parts[0], flow), expected(parts[-1], flow)])
        return outcome if outcome is None or outcome[0] == "error" else ("value", ["gate", *outcome[1]])
    return _expected_of_all(parts, flow)


def _expected_of_all(parts: list[Node], flow: str) -> Expected:
    """Return the outcome of several trees: the value of the last one, if no earlier one fails."""
    value, first_flow = None, flow
    for number, part in enumerate(parts):
        outcome = expected(part, flow, first=number == 0)
        if first_flow == "sim.holding" and outcome != expected(part, first_flow, first=number == 0):
            return None  # continued as sim.tree, and its steps may have been repaired before
        if outcome is not None and outcome[0] == "error" and flow == "sim.again":
            outcome = expected(part, flow, first=False)  # retried, as a new generation
        if outcome is None or outcome[0] == "error":
            return outcome
        value = outcome[1]
        if number + 1 < len(parts) and continues_as_tree(part):
            flow = "sim.tree"
    if flow == "sim.grown" and len(parts) > 1:  # each continuation uses the newest version
        value = ["version 2", 1, value]
    return ("value", value)


def expected(node: Node, flow: str = "sim.tree", first: bool = True) -> Expected:
    """Return the outcome of one tree in a run of this workflow; `first`: in its first generation."""
    kind, n, parts = node
    match kind:
        case "ok" | "slow" | "flaky" | "chance" | "wrote" | "stubborn":
            return ("value", n)
        case "undone":
            return ("value", n)  # all its behaviours succeed
        case "fails" | "hangs":
            return ("value", n) if flow == "sim.holding" else ("error", "StepFailed")  # held until it is repaired
        case "lately":
            return ("value", n) if flow == "sim.holding" or not first else ("error", "StepFailed")
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
    """Return whether the outcome differs in the first generation, which a fork does not have."""
    return bool(node[0] == "lately") or any(depends_on_generation(part) for part in node[2])
