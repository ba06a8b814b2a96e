"""Paths around part of the main path: from a tensor to a later cat, add or lerp that joins it with what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalelong.errors import NoLongSkipsError
from scalelong.skips.tracing.trace import Join, Node, Trace

MAX_WEIGHTS_ON_A_SKIP = 3  # a skip may be projected, but not pass through a network
BROADCASTS = frozenset({"expand", "expand_as", "repeat", "broadcast_to", "tile"})


def refusal(trace: Trace, reason: str) -> NoLongSkipsError:
    return NoLongSkipsError(f"model: this {trace.model} cannot be scaled: {reason}")


@dataclass(frozen=True)
class SkipPath:
    """A path around part of the main path; all numbers are nodes of the trace."""

    source: int  # where it leaves the main path
    nodes: tuple[int, ...]  # from the source to the operand, both included
    position: int  # which operand of the join it is
    join: int  # where it joins the main path
    op: Join
    owner: int  # the innermost module call that contains the whole path, -1 if none does
    around_one_module: bool  # join(x, f(x)) with a single module f
    nest: int = 1  # index of its U
    earlier: tuple[SkipPath, ...] = ()  # earlier joins of the same source, by earlier calls of the same module


def paths_to(trace: Trace, node: Node) -> Iterator[SkipPath]:
    """The paths that a node joins with the main path; paths from the network's input have a source of depth 0."""
    if node.join is None:
        return
    operands = [(position, operand) for position, operand in enumerate(node.join.operands) if operand is not None]
    main = max((operand for _, operand in operands), key=lambda operand: trace.depth[operand], default=-1)
    for position, operand in operands:
        nodes = _nodes_between(trace, operand, main) if operand != main else None
        if nodes is None:
            continue
        weights = count_weights(trace, nodes)
        between = trace.weights_between(nodes[0], main, at_most=weights + 1)
        if weights > MAX_WEIGHTS_ON_A_SKIP or between < max(weights, 1):
            continue  # a branch rather than a skip
        if node.join.kind != "cat" and node.name != "addmm" and trace.nodes[operand].shape != node.shape:
            continue  # broadcast over the main path: a condition
        owner, single = _owner(trace, nodes[0], main, node.index)
        yield SkipPath(nodes[0], nodes, position, node.index, node.join, owner, single)


def _nodes_between(trace: Trace, operand: int, main: int) -> tuple[int, ...] | None:
    """The nodes from the last one that `main` depends on to the operand; None if the operand has other sources."""
    nodes = [operand]
    while not trace.leads_to(nodes[-1], main):
        node = trace.nodes[nodes[-1]]
        if len(node.parents) != 1 or node.name in BROADCASTS:
            return None
        nodes.append(node.parents[0])
    return tuple(reversed(nodes))


def count_weights(trace: Trace, nodes: tuple[int, ...]) -> int:
    return sum(trace.nodes[node].weight is not None for node in nodes[1:])


def _owner(trace: Trace, source: int, main: int, join: int) -> tuple[int, bool]:
    """The innermost call that contains the path, and whether it computes the main path in one call and joins it itself."""
    first = min(child for child in trace.children[source] if trace.leads_to(child, main))
    around, path = trace.stack(trace.nodes[join].call), trace.stack(trace.nodes[first].call)
    shared = [a for a, b in zip(around, path, strict=False) if a == b]
    inner = path[len(shared)] if len(path) > len(shared) else None
    single = around == shared and inner is not None and trace.calls[inner].holds(main)
    return shared[-1] if shared else -1, single


def merge_repeats(trace: Trace, group: list[SkipPath]) -> list[SkipPath]:
    """Merge repeated calls of a module with the same skip into one skip."""
    merged = []
    for source in dict.fromkeys(path.source for path in group):
        same = sorted((path for path in group if path.source == source), key=lambda path: path.join)
        calls = [trace.nodes[path.join].call for path in same]
        modules = {trace.calls[call].module for call in calls if call >= 0}
        if len(same) > 1 and len(modules) == 1 and len(set(calls)) == len(same):
            same = [replace(same[-1], earlier=tuple(same[:-1]))]
        merged += same
    return merged
