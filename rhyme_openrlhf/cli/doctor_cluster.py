"""`rhyme doctor --cluster`: ask every node of the Ray cluster in RAY_ADDRESS what a run will need of it.

Nothing is started there but one short task a node, and nothing is changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

from rhyme_openrlhf.cli import doctor_checks, paths, upstream
from rhyme_openrlhf.cli.cluster_checks import Wanted, is_ready, judge
from rhyme_openrlhf.cli.console import print_table, refuse
from rhyme_openrlhf.cli.node_report import report
from rhyme_openrlhf.platform.cluster import ANSWER_SECONDS, ClusterError, Reply, ask, connected, nodes
from rhyme_openrlhf.run import model_shape, resources

HEADER = ("node", *doctor_checks.HEADER)


def main(train_argv: list[str], as_json: bool) -> int:
    """Print a table of the nodes; 0 when all of them will do, 1 when one lacks something, 2 for bad input."""
    if not os.environ.get("RAY_ADDRESS"):
        return refuse("rhyme doctor", "--cluster needs an address: RAY_ADDRESS=<head>:6379 rhyme doctor --cluster")
    try:
        wanted = wanted_of(_arguments(train_argv)) if train_argv else Wanted()
        checks = judge(_replies(wanted), wanted, os.environ)
    except (upstream.ArgumentsError, paths.RelativePathError, ClusterError) as error:
        return refuse("rhyme doctor", error)
    if as_json:
        print(json.dumps([{"node": one.node, **dataclasses.asdict(one.check)} for one in checks], indent=2))
    else:
        print_table([(one.node, *dataclasses.astuple(one.check)) for one in checks], doctor_checks.COLOURS, HEADER)
    return 0 if is_ready(checks) else 1


def _arguments(argv: list[str]) -> SimpleNamespace:
    args = upstream.parse(argv)
    paths.make_absolute(args, os.environ)
    return args


def wanted_of(args: SimpleNamespace) -> Wanted:
    """Return what a run with these arguments wants of each node."""
    shapes, layout = model_shape.shapes_of(args), resources.layout_of(args)
    buffer = shapes is not None and layout.buffer
    shm = resources.shared_memory(shapes.policy, layout) - resources.SHM_BYTES if shapes and buffer else 0.0
    shared = {args.ckpt.path: "--ckpt.path", args.ckpt.output_dir: "--ckpt.output_dir"}
    if args.history.store:
        shared[args.history.store] = "--history.store"
    return Wanted(shm, paths.read_by_nodes(args), shared, args.control.url)


def _replies(wanted: Wanted) -> list[Reply]:
    named = sorted({*wanted.read, *wanted.shared})
    with connected():
        found = nodes()
        replies = []
        for has_gpus in (True, False):
            asked = [node for node in found if bool(node.gpus) is has_gpus]
            replies += ask(asked, report, named, wanted.control_url, has_gpus, timeout_s=ANSWER_SECONDS)
    order = {node.key: place for place, node in enumerate(found)}
    return sorted(replies, key=lambda reply: (not reply.node.here, order[reply.node.key]))
