"""Which joins of a traced forward pass are long skips.

A skip path leaves the main path at a source and joins it again at a cat, add or lerp, after weighted ops. Of the paths that
are joined the same way in modules of one class, those of blocks (residuals, dense blocks) follow each other; long skips
nest: the first made is the last used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scalelong.errors import NoLongSkipsError as NoLongSkipsError
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
    earlier: tuple[SkipPath, ...] = ()  # earlier joins of the same source, by earlier calls of the same module


def _paths_to(trace: Trace, node: Node) -> Iterator[SkipPath]:
    if node.join is None:
        return
    operands = [(position, operand) for position, operand in enumerate(node.join.operands) if operand is not None]
    main = max((operand for _, operand in operands), key=lambda operand: trace.depth[operand], default=-1)
    for position, operand in operands:
        nodes = _nodes_between(trace, operand, main) if operand != main else None
        if nodes is None or trace.depth[nodes[0]] == 0:
            continue  # not a skip, or one from the input of the network
        weights = _count_weights(trace, nodes)
        between = trace.weights_between(nodes[0], main, at_most=weights + 1)
        if weights > MAX_WEIGHTS_ON_A_SKIP or between < max(weights, 1):
            continue  # a branch rather than a skip
        if node.join.kind != "cat" and node.name != "addmm" and trace.nodes[operand].shape != node.shape:
            continue  # broadcast over the main path: a condition
        owner, single = _owner(trace, nodes[0], main, node.index)
        yield SkipPath(nodes[0], nodes, position, node.index, node.join, owner, single)


def _nodes_between(trace: Trace, operand: int, main: int) -> tuple[int, ...] | None:
    """The nodes from the last one that `main` depends on to the operand; None if the operand has other sources too."""
    nodes = [operand]
    while not trace.leads_to(nodes[-1], main):
        node = trace.nodes[nodes[-1]]
        if len(node.parents) != 1 or node.name in BROADCASTS:
            return None
        nodes.append(node.parents[0])
    return tuple(reversed(nodes))


def _count_weights(trace: Trace, nodes: tuple[int, ...]) -> int:
    return sum(trace.nodes[node].weight is not None for node in nodes[1:])


def _owner(trace: Trace, source: int, main: int, join: int) -> tuple[int, bool]:
    """The innermost call that contains the path, and whether it makes the main path in a single call and joins it itself."""
    first = min(child for child in trace.children[source] if trace.leads_to(child, main))
    around, path = trace.stack(trace.nodes[join].call), trace.stack(trace.nodes[first].call)
    shared = [a for a, b in zip(around, path, strict=False) if a == b]
    inner = path[len(shared)] if len(path) > len(shared) else None
    single = around == shared and inner is not None and trace.calls[inner].holds(main)
    return shared[-1] if shared else -1, single


Nest = tuple[list[SkipPath], str | None]  # paths that enclose each other, outermost first; why they cannot be scaled


def find_long_skips(trace: Trace) -> list[SkipPath]:
    """The long skips of a traced network, outermost first; `NoLongSkipsError` says why there are none."""
    by_join = [list(_paths_to(trace, node)) for node in trace.nodes]
    crowded = [found for found in by_join if len(found) > 1]  # joins of dense blocks
    dense = {path.source for found in crowded for path in found}
    paths = [found[0] for found in by_join if len(found) == 1 and found[0].source not in dense]
    groups: dict[tuple[object, ...], list[SkipPath]] = defaultdict(list)
    for path in paths:
        around = path.op.kind == "add" and path.around_one_module
        groups[_module_class(trace, path.owner), path.op.kind, around].append(path)
    nests = [_nest_of(trace, group) for group in groups.values()]
    longest = max((len(nest) for nest, _ in nests), default=0)
    if longest == 0:
        detail = f", or several at once, as in {trace.module_name(crowded[0][0].join)}" if crowded else ""
        raise refusal(trace, f"it has no long skip connections: tensors are joined only within one block{detail}")
    tied = [(nest, trouble) for nest, trouble in nests if len(nest) == longest]
    clean = [nest for nest, trouble in tied if trouble is None]
    if not clean:
        raise refusal(trace, f"its skips cannot be scaled one by one: {tied[0][1]}")
    if len(clean) > 1:
        where = " and ".join(sorted(trace.module_name(nest[0].join) for nest in clean))
        raise refusal(
            trace, f"it has several nests of {longest} skips, joined in {where}; it is ambiguous which to scale"
        )
    chosen, missed = clean[0], None
    if (join := _unexplained_join(trace, chosen)) is not None:
        what = "something in the same way that does not come straight from the layers before it"
        missed = f"{trace.module_name(join)} joins {what}"
    elif other := _left_out(trace, chosen, nests) or _same_around(chosen, paths):
        missed = f"{trace.module_name(other.join)} joins another (by {other.op.kind}) in another way or class of module"
    if missed:
        raise refusal(trace, f"{longest} of its skips are clear, but {missed}; not all skips would be scaled")
    return chosen


def _nest_of(trace: Trace, group: list[SkipPath]) -> Nest:
    """The long skips in a group of paths: none if the paths follow each other or only go around one block."""
    group = _merge_repeats(trace, group)
    if _is_stack(group):
        return sorted(group, key=lambda path: -path.join), None
    uses = Counter(path.source for path in group)
    once = [path for path in group if uses[path.source] == 1]
    nest = longest_nest(once)
    if not nest or (len(nest) == 1 and (len(once) > 1 or _is_block(trace, nest[0]))):
        return [], None
    if 2 <= len(nest) <= _modules_in_a_row(trace, once):
        return [], None  # blocks with several streams
    for path in group:
        # a condition that many layers project for themselves, made before the first skip, does not count
        if uses[path.source] > 1 and (path.source > nest[0].source or not _count_weights(trace, path.nodes)):
            return nest, f"the output of {trace.module_name(path.source)} is joined more than once"
    rest = next((path for path in once if path not in nest), None)
    if rest is None:
        return nest, None
    where = f"the one from {trace.module_name(rest.source)} to {trace.module_name(rest.join)} does not fit in"
    clear = f"{len(nest)} of them enclose each other, but {where}"
    return nest, f"{clear}; scale each U-shaped part of the model separately"


def longest_nest(paths: Sequence[SkipPath]) -> list[SkipPath]:
    """The longest chain of paths that enclose each other, outermost first."""
    ordered = sorted(paths, key=lambda path: (path.source, -path.join))
    best: list[list[SkipPath]] = []
    for at, path in enumerate(ordered):
        outer = [best[k] for k in range(at) if ordered[k].source < path.source and ordered[k].join > path.join]
        best.append([*max(outer, key=len, default=[]), path])
    return max(best, key=len, default=[])


def _merge_repeats(trace: Trace, group: list[SkipPath]) -> list[SkipPath]:
    """A module that is called several times with the same skip joins one skip, not several."""
    merged = []
    for source in dict.fromkeys(path.source for path in group):
        same = sorted((path for path in group if path.source == source), key=lambda path: path.join)
        calls = [trace.nodes[path.join].call for path in same]
        modules = {trace.calls[call].module for call in calls if call >= 0}
        if len(same) > 1 and len(modules) == 1 and len(set(calls)) == len(same):
            same = [replace(same[-1], earlier=tuple(same[:-1]))]
        merged += same
    return merged


def _is_stack(group: Sequence[SkipPath]) -> bool:
    """Concatenations that pop a stack, with some entries twice in a row: an encoder stage that did nothing."""
    sources = [path.source for path in sorted(group, key=lambda path: path.join)]
    popped = sources == sorted(sources, reverse=True) and all(path.op.kind == "cat" for path in group)
    return popped and 1 < len(set(sources)) < len(sources)


def _is_block(trace: Trace, path: SkipPath) -> bool:
    """x + f(x) around one module or in a module that receives x, or x concatenated with several branches of it."""
    if path.op.kind == "cat":
        return sum(each is not None and trace.leads_to(path.source, each) for each in path.op.operands) > 2
    if path.owner < 0 or path.around_one_module:
        return path.owner >= 0
    return path.source < trace.calls[path.owner].start and trace.nodes[path.join].call == path.owner


def _modules_in_a_row(trace: Trace, paths: Sequence[SkipPath]) -> int:
    """How many module calls that own these paths follow each other, none inside another."""
    owners = sorted({path.owner for path in paths if path.owner >= 0}, key=lambda owner: trace.calls[owner].end)
    count, end = 0, -1
    for owner in owners:
        if trace.calls[owner].start >= end:
            count, end = count + 1, trace.calls[owner].end
    return count


def _left_out(trace: Trace, chosen: list[SkipPath], nests: Sequence[Nest]) -> SkipPath | None:
    """A long skip of another group: it nests with all chosen ones, or others nest with it, as in a second U."""
    for nest, trouble in nests:
        if nest is chosen:
            continue
        if len(nest) > 1 and trouble is None:
            return nest[0]
        for path in nest:
            added = path.op.kind == "add" and trace.nodes[path.join].call == path.owner
            if added and all(_is_inside(path, each) for each in chosen):
                continue  # the residual of the middle
            if all(_is_inside(path, each) or _is_inside(each, path) for each in chosen):
                return path
    return None


def _same_around(nest: Sequence[SkipPath], paths: Sequence[SkipPath]) -> SkipPath | None:
    """If the chosen ones are x + f(x) with the next inside f: another such path around the innermost."""
    if nest[0].op.kind != "add" or not nest[0].around_one_module:
        return None
    known = _joins(nest)
    alike = (path for path in paths if path.op.kind == "add" and path.around_one_module and path.join not in known)
    return next((path for path in alike if _is_inside(nest[-1], path)), None)


def _is_inside(inner: SkipPath, outer: SkipPath) -> bool:
    return outer.source <= inner.source and inner.join < outer.join


def _joins(nest: Sequence[SkipPath]) -> set[int]:
    return {each.join for path in nest for each in (path, *path.earlier)}


def _unexplained_join(trace: Trace, nest: Sequence[SkipPath]) -> int | None:
    """A join like those of the nest, in a module of the same class, that is not among them."""
    explained = _joins(nest)
    classes = {_module_class(trace, trace.nodes[join].call) for join in explained}
    for node in trace.nodes:
        join = node.join
        if node.index in explained or join is None or join.kind != nest[0].op.kind or join.kind == "add":
            continue  # adds are everywhere
        if node.index < min(explained) and len(trace.stack(node.call)) <= 1:
            continue  # the model itself joins conditions to its input
        operands = [operand for operand in join.operands if operand is not None and trace.depth[operand]]
        if len(operands) > 1 and _module_class(trace, node.call) in classes:
            return node.index
    return None


def _module_class(trace: Trace, call: int) -> type | None:
    return type(trace.calls[call].module) if call >= 0 else None
