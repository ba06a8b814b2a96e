"""Which joins of a traced forward pass are long skips.

A loop leaves the main path at a source, and joins it again at a cat, add or lerp, after operations with weights. Blocks have
loops too: a residual, a dense block. What sets long skips apart is that they nest, the first made is the last used. Loops are
compared with others of their kind (made by modules of one class, joined the same way): the blocks of a network follow each
other, its long skips enclose each other.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scalelong.skips.tracing.join_ops import Kind
from scalelong.skips.tracing.trace import Node, Trace

MOST_WEIGHTS_ON_A_SKIP = 3  # a projection of the skip may stand on its way, not a network
BROADCASTS = frozenset({"expand", "expand_as", "repeat", "broadcast_to", "tile"})


class NoLongSkipsError(ValueError):
    """A network has no long skips, or none that can be scaled one by one."""


@dataclass(frozen=True)
class Loop:
    """A way around part of the main path."""

    source: int  # the node where it leaves
    line: tuple[int, ...]  # the nodes from the source to the operand, both included
    position: int  # which operand of the join the skip is
    main: int  # the node it is joined with
    join: int  # the node of the join
    kind: Kind
    owner: int  # the innermost module call that holds the whole loop, -1 where none does
    around_one_module: bool  # join(x, f(x)) with a single module f
    again: tuple[Loop, ...] = ()  # earlier joins of the same source by the same module, called several times

    @property
    def operand(self) -> int:
        return self.line[-1]


def find_loops(trace: Trace) -> list[Loop]:
    """All loops in order of their joins, without those of dense blocks, where one join has several skips."""
    loops: list[Loop] = []
    dense: set[int] = set()
    for node in trace.nodes:
        if node.join is None:
            continue
        found = list(_loops_of(trace, node))
        if len(found) > 1:
            dense.update(loop.source for loop in found)
        loops += found if len(found) == 1 else []
    return [loop for loop in loops if loop.source not in dense]


def _loops_of(trace: Trace, node: Node) -> Iterator[Loop]:
    assert node.join is not None
    operands = [(at, operand) for at, operand in enumerate(node.join.operands) if operand is not None]
    if len(operands) < 2:
        return
    main = max((operand for _, operand in operands), key=lambda operand: trace.depth[operand])
    for position, operand in operands:
        line = _line(trace, operand, main) if operand != main else None
        if line is None or not _long_enough(trace, line, main):
            continue
        kind = node.join.kind
        if kind != "cat" and node.name != "addmm" and trace.nodes[operand].shape != node.shape:
            continue  # broadcast over the main path: a condition
        owner, single = _owner(trace, line[0], main, node.index)
        yield Loop(line[0], line, position, main, node.index, kind, owner, single)


def _line(trace: Trace, operand: int, main: int) -> tuple[int, ...] | None:
    """The nodes from the last one that `main` depends on to the operand; None if the operand has other sources too."""
    line = [operand]
    while not trace.leads_to(line[-1], main):
        node = trace.nodes[line[-1]]
        if len(node.parents) != 1 or node.name in BROADCASTS:
            return None
        line.append(node.parents[0])
    return tuple(reversed(line))


def _long_enough(trace: Trace, line: tuple[int, ...], main: int) -> bool:
    weights = _weights(trace, line)
    if trace.depth[line[0]] == 0 or weights > MOST_WEIGHTS_ON_A_SKIP:
        return False  # the network's own input, or a branch rather than a skip
    return trace.weights_between(line[0], main, at_most=weights + 1) >= max(weights, 1)


def _weights(trace: Trace, line: tuple[int, ...]) -> int:
    return sum(trace.nodes[node].weighted for node in line[1:])


def _owner(trace: Trace, source: int, main: int, join: int) -> tuple[int, bool]:
    """The innermost call that holds the loop, and whether the main path is one call made right in it, as is the join."""
    first = min(child for child in trace.children[source] if trace.leads_to(child, main))
    around, path = trace.stack(join), trace.stack(first)
    shared = [a for a, b in zip(around, path, strict=False) if a == b]
    owner = shared[-1] if shared else -1
    inner = path[len(shared)] if len(path) > len(shared) else None
    single = around == shared and inner is not None and trace.calls[inner].holds(main)
    return owner, single


def longest_nest(loops: Sequence[Loop]) -> list[Loop]:
    """The longest chain of loops that enclose each other, outermost first."""
    ordered = sorted(loops, key=lambda loop: (loop.source, -loop.join))
    best: list[list[Loop]] = []
    for at, loop in enumerate(ordered):
        outer = [best[k] for k in range(at) if ordered[k].source < loop.source and ordered[k].join > loop.join]
        best.append([*max(outer, key=len, default=[]), loop])
    return max(best, key=len, default=[])


def long_loops(trace: Trace) -> list[Loop]:
    """The long skips of a traced network, outermost first; `NoLongSkipsError` says why there are none."""
    groups: dict[tuple[object, ...], list[Loop]] = defaultdict(list)
    loops = find_loops(trace)
    for loop in loops:
        owner = type(trace.calls[loop.owner].module) if loop.owner >= 0 else None
        groups[owner, loop.kind, loop.kind == "add" and loop.around_one_module].append(loop)
    nests = [_nest_of(trace, group) for group in groups.values()]
    longest = max((len(nest.loops) for nest in nests), default=0)
    if longest == 0:
        crowded = next((n.index for n in trace.nodes if n.join and len(list(_loops_of(trace, n))) > 1), None)
        detail = "" if crowded is None else f", or several at once, as in {_place(trace, crowded)}"
        raise NoLongSkipsError(f"it has no long skip connections: nothing is joined again but within one block{detail}")
    tied = [nest for nest in nests if len(nest.loops) == longest]
    clean = [nest for nest in tied if nest.trouble is None]
    if not clean:
        raise NoLongSkipsError(f"its skips cannot be scaled one by one: {tied[0].trouble}")
    if len(clean) > 1:
        where = " and ".join(sorted(_place(trace, nest.loops[0].join) for nest in clean))
        raise NoLongSkipsError(
            f"it has several nests of {longest} skips, joined in {where}; which is meant is not clear"
        )
    missed = _unexplained(trace, clean[0].loops)
    if missed is not None:
        raise NoLongSkipsError(
            f"{longest} of its skips are clear, but {_place(trace, missed)} joins something in the same way that does not "
            "come straight from the layers before it; not all skips would be scaled"
        )
    other = _left_out(trace, clean[0], nests) or _same_around(clean[0].loops, loops)
    if other is not None:
        raise NoLongSkipsError(
            f"{longest} of its skips are clear, but {_place(trace, other.join)} joins another (by {other.kind}) in another "
            "way or in a module of another class; not all skips would be scaled. Join all of them alike to have them found"
        )
    return clean[0].loops


def _left_out(trace: Trace, chosen: _Nest, nests: Sequence[_Nest]) -> Loop | None:
    """A long skip of another sort: it nests with all that are chosen, or others nest with it, as in a second U.

    x + f(x) inside them all, added where x stands, is the residual of the middle.
    """
    for nest in nests:
        if nest is chosen or not nest.loops:
            continue
        if len(nest.loops) > 1 and nest.trouble is None:
            return nest.loops[0]
        for loop in nest.loops:
            middle = loop.kind == "add" and trace.nodes[loop.join].call == loop.owner
            if middle and all(_lies_in(loop, each) for each in chosen.loops):
                continue
            if all(_lies_in(loop, each) or _lies_in(each, loop) for each in chosen.loops):
                return loop
    return None


def _same_around(nest: Sequence[Loop], loops: Sequence[Loop]) -> Loop | None:
    """Where the chosen ones are x + f(x) with the next inside f: another such around the innermost."""
    if nest[0].kind != "add" or not nest[0].around_one_module:
        return None
    known = {each.join for loop in nest for each in (loop, *loop.again)}
    alike = (loop for loop in loops if loop.kind == "add" and loop.around_one_module and loop.join not in known)
    return next((loop for loop in alike if _lies_in(nest[-1], loop)), None)


def _lies_in(inner: Loop, outer: Loop) -> bool:
    return outer.source <= inner.source and inner.join < outer.join


def _unexplained(trace: Trace, nest: Sequence[Loop]) -> int | None:
    """A join like those of the nest, by a module of the same class, that is none of them; the model itself: no earlier."""
    explained = {each.join for loop in nest for each in (loop, *loop.again)}
    frames = {_frame(trace, join) for join in explained}
    for node in trace.nodes:
        join = node.join
        if node.index in explained or join is None or join.kind != nest[0].kind or join.kind == "add":
            continue  # adds are everywhere
        if node.index < min(explained) and len(trace.stack(node.index)) <= 1:
            continue  # conditions are joined to the input
        operands = [operand for operand in join.operands if operand is not None and trace.depth[operand]]
        if len(operands) > 1 and _frame(trace, node.index) in frames:
            return node.index
    return None


def _frame(trace: Trace, node: int) -> type | None:
    call = trace.nodes[node].call
    return type(trace.calls[call].module) if call >= 0 else None


@dataclass(frozen=True)
class _Nest:
    loops: list[Loop]
    trouble: str | None


def _nest_of(trace: Trace, group: list[Loop]) -> _Nest:
    """The long skips among loops of one sort: none where they follow each other or only go around one block."""
    group = _merge_repeats(trace, group)
    if _is_stack(group):
        return _Nest(sorted(group, key=lambda loop: -loop.join), None)
    uses = Counter(loop.source for loop in group)
    once = [loop for loop in group if uses[loop.source] == 1]
    nest = longest_nest(once)
    if not nest or (len(nest) == 1 and (len(once) > 1 or _is_block(trace, nest[0]))):
        return _Nest([], None)
    if 2 <= len(nest) <= _modules_in_a_row(trace, once):
        return _Nest([], None)  # blocks with several streams
    repeated = [
        loop
        for loop in group
        if uses[loop.source] > 1 and (loop.source > nest[0].source or not _weights(trace, loop.line))
    ]  # a condition that many layers project for themselves, made before the first skip, is none
    if repeated:
        return _Nest(nest, f"the output of {_place(trace, repeated[0].source)} is joined more than once")
    rest = [loop for loop in once if loop not in nest]
    if rest:
        where = f"{_place(trace, rest[0].source)} to {_place(trace, rest[0].join)}"
        return _Nest(
            nest,
            f"{len(nest)} of them enclose each other, but the one from {where} does not fit in; "
            "scale each U-shaped part of the model by itself",
        )
    return _Nest(nest, None)


def _is_stack(group: Sequence[Loop]) -> bool:
    """Concatenations that take what was put on a stack, some of it twice in a row: an encoder stage that did nothing."""
    sources = [loop.source for loop in sorted(group, key=lambda loop: loop.join)]
    distinct = len(set(sources))
    return (
        1 < distinct < len(sources)
        and all(loop.kind == "cat" for loop in group)
        and all(inner >= outer for inner, outer in itertools.pairwise(sources))
    )


def _merge_repeats(trace: Trace, group: list[Loop]) -> list[Loop]:
    """A module that is called several times with the same skip joins one skip, not several."""
    merged = []
    for source in dict.fromkeys(loop.source for loop in group):
        same = sorted((loop for loop in group if loop.source == source), key=lambda loop: loop.join)
        modules = {trace.calls[trace.nodes[loop.join].call].module for loop in same if trace.nodes[loop.join].call >= 0}
        frames = {trace.nodes[loop.join].call for loop in same}
        if len(same) > 1 and len(modules) == 1 and len(frames) == len(same):
            same = [replace(same[-1], again=tuple(same[:-1]))]
        merged += same
    return merged


def _modules_in_a_row(trace: Trace, loops: Sequence[Loop]) -> int:
    """How many module calls that own these loops follow each other, none inside another."""
    owners = sorted({loop.owner for loop in loops if loop.owner >= 0}, key=lambda owner: trace.calls[owner].end)
    count, end = 0, -1
    for owner in owners:
        if trace.calls[owner].start >= end:
            count, end = count + 1, trace.calls[owner].end
    return count


def _is_block(trace: Trace, loop: Loop) -> bool:
    """x + f(x) around one module, or in a module that was handed x, or x beside several branches of it: one block."""
    if loop.kind == "cat":
        join = trace.nodes[loop.join].join
        operands = join.operands if join is not None else ()
        return sum(each is not None and trace.leads_to(loop.source, each) for each in operands) > 2
    if loop.owner < 0:
        return False
    if loop.around_one_module:
        return True
    owner = trace.calls[loop.owner]
    return loop.source < owner.start and trace.nodes[loop.join].call == loop.owner


def _place(trace: Trace, node: int) -> str:
    call = trace.nodes[node].call
    name = trace.calls[call].name if call >= 0 else ""
    return name or "the model itself"
