"""A shortcut through `sendrecv`, which a large run calls millions of times.

A ring of 1,024 ranks makes 2,095,104 such calls. `SimComm.exchange` shows how each of
them works, with one function for each thing to do. Here a single function does the
same, for calls without anything special: no faults, no time limit, no missing peer, and
no receive from anyone. If there is something special, before the call or when the rank
passes on control, we leave it to those functions. Both work on the same channels, ends
and events and may take turns. The tests compare them on random programs.

Two things make it fast:

    a pair      who sends to X and receives from Y does it again: its ends and the
                queues in which they meet others are kept, and found by one comparison
    a turn      if another rank is ready, it is entered from here; only the clock's next
                event takes the kernel
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Traffic
from distlab.sim.carriers import RankEnded
from distlab.sim.channels import Channel, End, Group
from distlab.sim.kernel import Fiber, Flight
from distlab.sim.payload import Sized


class Pair:
    """One rank's messages to `dst` and from `src`, with both ends to be reused."""

    __slots__ = (
        *("both", "dst", "inward", "inward_receives", "outward", "outward_sends"),
        *("receives", "receiving", "sending", "sends", "src"),
    )

    def __init__(self, group: Group, rank: int, dst: int, src: int) -> None:
        self.dst, self.src = dst, src
        self.outward: Channel = group.channel(rank, dst, 0)
        self.inward: Channel = group.channel(src, rank, 0)
        self.receives = self.outward.receives  # that wait for what this rank sends
        self.sends = self.inward.sends
        self.outward_sends = self.outward.sends  # where its own ends wait
        self.inward_receives = self.inward.receives
        self.sending = End(group, "send", rank, dst, 0, None, 0)
        self.receiving = End(group, "recv", rank, src, 0, None, 0)
        self.receiving.channel = self.inward
        self.both = (self.sending, self.receiving)


class FastExchange:
    """The `sendrecv` of a SimComm."""

    def __init__(self, group: Group, rank: int, traffic: Traffic | None) -> None:
        self.group = group
        self._kernel = group.kernel
        self.rank, self.world_size = rank, len(group.members)  # read all the time
        self._traffic = traffic
        self._step = 0
        self._pair: Pair | None = None  # the last one
        self._pairs: dict[tuple[int, int], Pair] = {}

    def exchange(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        timeout_s: float | None,
    ) -> None:
        """Implement `sendrecv` for every case, however special."""
        raise NotImplementedError

    def give_up(
        self, flight: Flight, in_time: bool, since_ps: int, peer: int | None, step: int
    ) -> None:
        """Raise the reason why a flight that the rank awaited didn't succeed."""
        raise NotImplementedError

    def sendrecv(  # noqa: C901 - in one piece, because a call costs as much as a line
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Implement `Comm.sendrecv`."""
        pair, kernel, group = self._pair, self._kernel, self.group
        if pair is None or pair.dst is not dst or pair.src is not src:
            pair = self._pair_of(dst, src)
        fiber = kernel.current
        kind: Any = type(send_tensor)  # or Sized, which passes for one
        if (
            pair is None
            or not group.is_plain
            or timeout_s is not None
            or fiber is None
            or _thread_id() != kernel.thread_id
            or _graph_task_id() != -1
            or type(recv_tensor) is not kind
            or not (
                kind is Sized
                or (
                    kind is Tensor
                    and send_tensor.is_cpu
                    and recv_tensor.is_cpu
                    and send_tensor.is_contiguous()
                    and recv_tensor.is_contiguous()
                )
            )
        ):
            self.exchange(send_tensor, dst, recv_tensor, src, timeout_s)
            return
        # Post both ends; what meets its match goes.
        sending, receiving, step = pair.sending, pair.receiving, self._step
        num_bytes, traffic = send_tensor.nbytes, self._traffic
        if traffic is not None:
            traffic.messages += 1
            traffic.sent_bytes += num_bytes
        sending.done = sending.met = receiving.done = receiving.met = False
        sending.tensor, sending.step = send_tensor, step + 1
        sending.num_bytes = num_bytes
        receiving.step = self._step = step + 2
        if kind is not Sized:  # on arrival they would have to be fetched once more
            sending.address = send_tensor.data_ptr()
            receiving.address = recv_tensor.data_ptr()
            receiving.num_bytes, receiving.tensor = recv_tensor.nbytes, recv_tensor
        elif sending.address:
            sending.address = receiving.address = 0
        if pair.receives:
            match = pair.receives.popleft()
            match.other, match.met = sending, True
            sending.met = True
            kernel.met.append(match)
        else:
            sending.posted = group.num_posted = group.num_posted + 1
            pair.outward_sends.append(sending)
        if pair.sends:
            match = receiving.other = pair.sends.popleft()
            match.met = receiving.met = True
            kernel.met.append(receiving)
        else:
            receiving.posted = group.num_posted = group.num_posted + 1
            pair.inward_receives.append(receiving)
        # Wait for what comes in, then for what goes out: it may be through by then.
        since_ps, ready, generators = kernel.now_ps, kernel.ready, kernel.generators
        receiving.waiter, fiber.needs, mode = fiber, pair.both, kernel.mode
        while True:
            if (
                ready
                and not kernel.num_unstarted
                and generators.word.value == generators.seen_word
            ):
                following = kernel.current = ready.popleft()
                grad = mode.grad = _is_grad_enabled()
                following.switch()
                if mode.grad is not grad:
                    _set_grad_enabled(grad)
                if kernel.closing:
                    raise RankEnded
                if generators.anyone_drew and fiber.numbers.drew:
                    generators.put(fiber.numbers)
            else:
                kernel.pause(fiber)
            if sending.done or receiving.error is not None:
                break
            since_ps = kernel.now_ps
            sending.waiter, fiber.needs = fiber, (sending,)
        if sending.error is not None or receiving.error is not None:
            self._fail(fiber, pair, since_ps)
        sending.tensor = receiving.tensor = None

    def _pair_of(self, dst: int, src: int) -> Pair | None:
        """Return the pair; None if one of them isn't another member of the group."""
        if type(dst) is not int or type(src) is not int:
            return None
        pair = self._pairs.get((dst, src))
        if pair is None:
            others = range(len(self.group.members))
            if dst not in others or src not in others or self.rank in (dst, src):
                return None
            pair = self._pairs[dst, src] = Pair(self.group, self.rank, dst, src)
        pair.dst, pair.src = dst, src  # these very objects
        self._pair = pair
        return pair

    def _fail(self, fiber: Fiber, pair: Pair, since_ps: int) -> None:
        self._pair = None
        self._pairs.clear()  # one of its ends may still wait to meet another
        end, now_ps = pair.receiving, self._kernel.now_ps
        if end.error is None:
            end = pair.sending
            since_ps = now_ps if len(fiber.needs) == 2 else since_ps
        self.give_up(end, True, since_ps, end.peer, end.step)


_thread_id = threading.get_ident
_graph_task_id = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
