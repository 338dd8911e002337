"""Move bytes in the thread that waits, or otherwise in one that stands by.

A rank that waits drives the sockets itself, so a message needs no switch between
threads and always takes about the same time. But a rank must also serve its peers while
it computes, or after it has returned from a call without a wait: an `isend` must
arrive, and a large message must be drained, as on gloo. For this, there is a second
thread. It sleeps in the kernel, and only a line with a transfer in progress can wake
it, while no other thread drives:

    rank waits      it drives             the other sleeps, no line is armed
    rank computes   nothing under way     the other sleeps, no line is armed
    rank computes   transfers under way   their lines are armed: the other drives

Nothing polls on a timer. `ExchangeDriver` starts the thread, hence after a fork, and
below `threading`, because it belongs to the transport and not to the program.

Source: leader and followers (Schmidt and others, 2000).
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from distlab.comm.tcp.exchange import Exchange
from distlab.comm.tcp.flights import Flight
from distlab.comm.tcp.line import Line
from distlab.comm.tcp.peers import Peer
from distlab.comm.tcp.poll import READ, WRITE, poller

FAREWELL_S = 1.0  # for what is still in the outbox when a rank ends


class ExchangeDriver:
    """Drives an exchange; any thread that touches the exchange must hold `lock`."""

    def __init__(self, exchange: Exchange) -> None:
        self.lock = _thread.allocate_lock()
        self.exchange = exchange
        self._poller, self._standby = poller(), poller()
        self._peers: dict[int, Peer] = {}  # by the descriptor of the line
        self._armed: dict[int, int] = {}  # peer: events
        self._full: set[int] = set()  # peers whose sockets take no more for now
        self._driving = False
        self._queue: deque[threading.Event] = deque()  # threads that wait their turn
        self._closed = False
        exchange.on_blocked = self._await_room
        exchange.on_lost = self._hang_up
        for peer in exchange.peers.values():
            descriptor = peer.line.socket.fileno()
            self._peers[descriptor] = peer
            self._poller.register(descriptor, READ)
        # Readable from `close` on: who sleeps in a poller is to see that it is over.
        self._over, self._make_over = os.pipe()
        self._poller.register(self._over, READ)
        self._standby.register(self._over, READ)
        self._stands_by = bool(exchange.peers)
        if self._stands_by:
            _thread.start_new_thread(self._stand_by, ())

    def post(self, *acts: Callable[[], None], overlap: bool = False) -> None:
        """Do `acts`; with `overlap`, the caller may continue without a long wait."""
        with self.lock:
            for act in acts:
                act()
            self.exchange.settle()
            if overlap and not self._driving:
                self._arm()

    def wait(self, flight: Flight, limit_s: float) -> bool:
        """Block until `flight` is done; return False after `limit_s` seconds."""
        if flight.done:
            return True
        until = time.monotonic() + limit_s
        with self.lock:
            try:
                while not flight.done:
                    if time.monotonic() >= until:
                        return False
                    if self._driving:
                        self._follow(flight, until)
                    else:
                        self._drive(flight, until)
            finally:
                self._hand_over()
        return True

    def close(self) -> None:
        """Shut down properly: send what is waiting, and leave the peers."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.exchange.bye()
            self.exchange.settle()
            until = time.monotonic() + FAREWELL_S
            while self._full and (left_s := until - time.monotonic()) > 0:
                self._serve(left_s)
            self.exchange.part()
            os.write(self._make_over, b"x")
            self._dismantle()

    def _dismantle(self) -> None:
        """Close the pollers; the last thread that used them does this."""
        if self._driving or self._queue or self._stands_by or self._over < 0:
            return
        self._poller.close()
        self._standby.close()
        os.close(self._over)
        os.close(self._make_over)
        self._over = -1

    # ── the thread that waits ───────────────────────────────────────────────────────

    def _drive(self, flight: Flight, until: float) -> None:
        """Serve all lines until `flight` is done; hold the lock except during waits."""
        self._driving = True
        self._disarm()
        try:
            while not flight.done:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self._serve(left_s)
        finally:
            self._driving = False

    def _hand_over(self) -> None:
        """When a thread stops waiting, make sure that another drives, if necessary."""
        if self._driving:
            return
        if self._queue:
            self._queue[0].set()
        elif self._closed:
            self._dismantle()
        else:
            self._arm()

    def _follow(self, flight: Flight, until: float) -> None:
        """Sleep until `flight` is done or the driving thread stops driving."""
        bell = flight.bell = threading.Event()
        self._queue.append(bell)
        self.lock.release()
        try:
            bell.wait(max(0.0, until - time.monotonic()))
        finally:
            self.lock.acquire()
            self._queue.remove(bell)

    def _serve(self, timeout_s: float) -> None:
        """Wait for one round of events and handle it.

        If it doesn't wait, it keeps the lock. Otherwise, a rank that began to drive in
        the meantime would sleep, waiting for the events that we have just handled.
        """
        if timeout_s > 0:
            self.lock.release()
        try:
            ready = self._poller.poll(timeout_s)
        finally:
            if timeout_s > 0:
                self.lock.acquire()
        for descriptor, events in ready:
            peer = self._peers.get(descriptor)
            if peer is None:  # it was lost while we waited
                continue
            if events & WRITE:
                self._write(peer)
            if events & ~WRITE:  # also errors and the end of the line show on reading
                self.exchange.read(peer)
        self.exchange.settle()

    def _write(self, peer: Peer) -> None:
        self.exchange.flush(peer)
        if not peer.line.outbox and not peer.lost:
            self._full.discard(peer.line.peer)
            self._poller.modify(peer.line.socket.fileno(), READ)

    def _await_room(self, line: Line) -> None:
        if line.peer not in self._full:
            self._full.add(line.peer)
            self._poller.modify(line.socket.fileno(), READ | WRITE)

    def _hang_up(self, line: Line) -> None:
        self._full.discard(line.peer)
        descriptor = line.socket.fileno()
        del self._peers[descriptor]
        self._poller.unregister(descriptor)
        if self._armed.pop(line.peer, None):
            self._standby.unregister(descriptor)
        line.socket.close()

    # ── the thread that stands by ───────────────────────────────────────────────────

    def _arm(self) -> None:
        """Let lines with a transfer in progress wake the standby thread."""
        if not (self._armed or self._full or self.exchange.pending):
            return
        for number, peer in self.exchange.peers.items():
            if peer.lost:
                continue
            events = (READ if peer.pending else 0) | (WRITE if peer.line.outbox else 0)
            if events != self._armed.get(number, 0):
                self._rearm(number, peer.line, events)

    def _rearm(self, number: int, line: Line, events: int) -> None:
        before = self._armed.pop(number, 0)
        if events:
            self._armed[number] = events
        descriptor = line.socket.fileno()
        if not events:
            self._standby.unregister(descriptor)
        elif before:
            self._standby.modify(descriptor, events)
        else:
            self._standby.register(descriptor, events)

    def _disarm(self) -> None:
        for number in list(self._armed):
            self._rearm(number, self.exchange.peers[number].line, 0)

    def _stand_by(self) -> None:
        while True:
            self._standby.poll()
            with self.lock:
                if self._closed:
                    self._stands_by = False
                    self._hand_over()
                    return
                if not self._driving:
                    self._serve(0.0)
                    self._hand_over()
