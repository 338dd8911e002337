"""Your tests for `collectives`. To score them, run: distlab score-test collectives

A test should pass with every right solution and fail with wrong ones. We run it with
the solutions of each task whose function it names. It can take two parameters:

run    results = run(program, n) runs program(comm, unit) on n simulated ranks, and
       returns a list with each rank's return value. It fails if a rank raises, if
       all ranks wait, or if a message doesn't fit. results.messages and
       results.num_bytes count what each rank sent, and .rounds, after
       run(program, n, message_bytes=8), is the longest chain of 8-byte messages.
unit   the solution, for tests that don't need any ranks

Functions: send_recv, ring_shift, broadcast, all_reduce, all_gather, reduce_scatter,
  tree_broadcast, all_to_all
"""

import torch


def test_send_recv(run):
    def program(comm, unit):
        tensor = torch.tensor([float(comm.rank)])
        # call unit.send_recv here, as its docstring says
        return tensor

    results = run(program, 3)
    assert len(results) == 3
