"""Elastic training: ranks come and go in the middle of an epoch.

Guide: phase4_production/guide/elastic.md.
Source: torch.distributed.elastic, its rendezvous; Elastic Horovod, its documentation.
Symbols: N = the samples of an epoch; G = global_batch_size; n = world_size.
Cost: no communication in this file, because both parts decide and others act.

    generation 1   a b c d     4 ranks, 2 steps      samples  0 … 2G - 1
                     x   x     two processes end
    generation 2   a c         2 ranks, 1 step       samples 2G … 3G - 1
                   a c + e     one process joins
    generation 3   a c e       3 ranks               samples 3G … N - 1

When n changes, we keep the order of the samples, G, and the state of one survivor.
We compute the ranks, the shards, and the steps of accumulation again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distlab.comm.services import WakeAt
from distlab.given.elastic import (
    Action,
    Event,
    Form,
    Join,
    Lost,
    Refuse,
    Regroup,
    Stop,
    mosaic,
)

# ── the samples ─────────────────────────────────────────────────────────────────────


def resplit(
    order: Sequence[int],
    global_batch_size: int,
    history: Sequence[Sequence[int]],
    world_size: int,
) -> list[list[list[int]]]:
    """Plan each rank's samples in each step of the rest of an epoch: plan[rank][step].

    Given: `order` is the shuffle of the epoch, each sample once. `history` has a list
    for each world size that this epoch has had: how many steps of its plan each rank
    has completed. That plan is what `resplit` returned then.

    C1 Each step takes the next global_batch_size of the remaining samples, in shuffle
       order. The last step may have fewer, but it has at least one.
    C2 The remaining samples are those that no rank has completed at any earlier world
       size. Ranks may have completed different numbers of steps.
    C3 Within a step, shard sizes differ by at most one. A shard may be empty, because
       every rank takes part in every step and no sample is repeated to even out the
       shards.
    In torch.distributed: nothing; DistributedSampler cannot start mid-epoch
    Example: order 7 2 9 4 1, global batches of 2, history [[1, 1]]: 2 ranks had one
    step. On 1 rank → [[[9, 4], [1]]]
    Cost: none. Check: distlab check 4.8
    """
    ### BEGIN SOLUTION elastic.resplit
    #| how was the rest split each time before, and what is left of it now? the first
    #| time all samples are left
    left, plan = list(order), []
    # The last time nothing is completed yet: that plan is the result.
    for steps in [*history, [0] * world_size]:
        n, starts = len(steps), range(0, len(left), global_batch_size)
        batches = [left[start : start + global_batch_size] for start in starts]
        plan = [[batch[rank::n] for batch in batches] for rank in range(n)]
        shards = [shard[:num] for shard, num in zip(plan, steps, strict=True)]
        done = {index for shard in shards for batch in shard for index in batch}
        left = [index for index in left if index not in done]
    return plan
    ### END SOLUTION


# ── the members ─────────────────────────────────────────────────────────────────────


class Membership:
    """Decides who becomes a rank of the next generation, and whose state they all take.

    A plain object that reads no clock and sends nothing. Events: Join, Lost, Tick.
    Actions: Regroup, Form, Refuse, WakeAt, Stop; see distlab/given/elastic.py.

    In a round, members join until a Form ends it and a generation trains. The first
    round begins at once, and before it there are no members.

    C1 A round begins when a member of this generation joins or is lost, and when a new
       member joins while fewer than max_members are training. A Join that is refused or
       is only a copy doesn't begin a round.
    C2 Members of the last generation get the first ranks, in any order, followed by new
       members in the order of their first Joins, because a copy doesn't change a
       member's place. Every member beyond max_members gets a Refuse. grad_accum_steps
       is the same for every rank. It is the number of microbatches, of at most
       microbatch_size samples each, that the largest shard of the global batch needs.
    C3 Among the members of the last generation that have joined, the one with the
       newest step is the source. In the first round, which has no last generation, all
       members that are taken count.
    C4 A Join is refused and changes nothing if it comes from a member that has ended,
       from a member of an older generation (whose state is behind), or from a new
       member while max_members are already training. During a round, every new member
       is noted, no matter how many have joined. If a member of this generation sends a
       copy of an older message, it gets no answer.
    C5 A Form is possible when min_members have joined and there is a majority. It comes
       at once if max_members have joined and no member is unheard. Otherwise, it comes
       at the first event that is at least grace_s later than the time at which it
       became possible. If a Form stays impossible for timeout_s, the answer is Stop.
       There is a WakeAt for each of these times. An event that changes whether a Form
       is possible starts a new wait, even if it comes at or after the deadline.
    C6 When the network is divided, at most one side has a majority. That is the side on
       which more members have joined than could join on the other side. If the numbers
       are equal, it is the side on which the lowest rank has joined. A member that has
       ended can't join on either side, so if all have ended, the state is lost and
       there is no majority. In the first round, there is always a majority.
    In torch.distributed: the rendezvous of torchrun --nnodes=MIN:MAX
    Check: distlab check 4.9
    """

    def __init__(
        self,
        min_members: int,
        max_members: int,
        *,
        global_batch_size: int,
        microbatch_size: int,
        grace_s: float = 5.0,
        timeout_s: float = 600.0,
    ) -> None:
        if not 1 <= min_members <= max_members <= global_batch_size:
            raise ValueError(
                f"min_members {min_members}, max_members {max_members} and "
                f"global_batch_size {global_batch_size} must rise, from 1"
            )
        self.min_members, self.max_members = min_members, max_members
        self.global_batch_size = global_batch_size
        self.microbatch_size = microbatch_size  # the most samples that fit a rank
        self.grace_s, self.timeout_s = grace_s, timeout_s
        self.generation = 0  # the newest that was formed
        self.members: list[str] = []  # of this generation, by rank
        self.ended: set[str] = set()  # members whose process has ended
        self.joined: dict[str, int] = {}  # in this round: member → step
        self.is_round = True
        self.could_form = False  # after the last event of this round
        self.deadline_s = math.inf
        self.is_stopped = False

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Return what to do about an event; `now_s` never decreases.

        After a Stop there are no more actions.
        """
        actions: list[Action] = []
        if not self.is_stopped:
            match event:
                case Join():
                    actions += self.join(event)
                case Lost(member, ended):
                    actions += self.lose(member, ended)
            if self.is_round:
                actions += self.end_round(now_s)
        return actions

    def join(self, event: Join) -> list[Action]:
        """Note a member that is waiting, or refuse it.

        Given: begin_round, which asks all that are unheard. A new member has the
        generation 0. No generation is higher than the current one.

        Clause C1 says which Joins begin a round, and C4 which are refused.
        Example: generation 2 trains as a, c; Join(b, 7, 1) is refused, Join(c, 7, 1) is
        a copy
        """
        ### BEGIN SOLUTION elastic.resize
        #| who is it: a member of this generation, of an older one, or a new one? is
        #| there a round?
        member, generation = event.member, event.generation
        if member in self.ended:
            return [Refuse(member, "its process has ended")]
        if generation < self.generation and member in self.members:
            return []
        if 0 < generation < self.generation:
            now = f"generation {generation}; now it is {self.generation}"
            return [Refuse(member, now)]
        is_full = not self.is_round and len(self.members) == self.max_members
        if is_full and member not in self.members:
            return [Refuse(member, f"{self.max_members} members train")]
        self.joined[member] = event.step
        return self.begin_round()
        ### END SOLUTION

    def lose(self, member: str, ended: bool) -> list[Action]:
        """Note that a member is lost; it may come back, unless its process has ended.

        A lost member of this generation begins a round, and any other doesn't (C1).
        Example: a, b, c train; Lost(b) → Regroup(a, c). Then Lost(c) → no action
        """
        ### BEGIN SOLUTION elastic.resize
        #| is it a member of this generation? had it joined this round?
        self.joined.pop(member, None)
        if ended:
            self.ended.add(member)
        return self.begin_round(lost=member) if member in self.members else []
        ### END SOLUTION

    def begin_round(self, lost: str = "") -> list[Action]:
        """Ask the others to stop and join, unless there is a round already."""
        if self.is_round:
            return []
        self.is_round, self.could_form, self.deadline_s = True, False, math.inf
        asked = tuple(member for member in self.unheard if member != lost)
        return [Regroup(asked)] if asked else []

    def end_round(self, now_s: float) -> list[Action]:
        """Form, stop, or wait; called after each event of a round.

        Given: form, stop, is_majority. could_form and deadline_s are False and inf when
        a round begins.

        Clause C5 says when a Form comes, when a Stop, and when a WakeAt.
        Example: min 2, grace 5: Joins at 0, 1 and 3 s → WakeAt(6), Form of 3 at 6 s
        """
        ### BEGIN SOLUTION elastic.resize
        #| a Tick says only that time has passed, and may come late: what do you look
        #| at first?
        can_form = len(self.joined) >= self.min_members and self.is_majority
        if can_form and len(self.joined) >= self.max_members and not self.unheard:
            return self.form()
        if can_form != self.could_form or self.deadline_s == math.inf:
            self.could_form = can_form
            self.deadline_s = now_s + (self.grace_s if can_form else self.timeout_s)
            return [WakeAt(self.deadline_s)]
        if now_s < self.deadline_s:
            return []
        return self.form() if can_form else self.stop()
        ### END SOLUTION

    @property
    def unheard(self) -> list[str]:
        """Return this generation's members that may be alive and haven't joined."""
        return [m for m in self.members if m not in {*self.joined, *self.ended}]

    @property
    def is_majority(self) -> bool:
        """Return True if no other part of a divided job can form a generation as well.

        When the network is divided, two of these objects may exist, one on each side.
        Both know this generation, and each hears only the members on its side.

        Clause C6 says on which side it is True.
        Example: a b c d train; a, b joined, c and d are lost, not ended → True; on the
        other side False. There it would be True, if a and b had ended
        """
        ### BEGIN SOLUTION elastic.resize
        #| whom can the other side have heard, at most?
        heard, unheard = [m for m in self.members if m in self.joined], self.unheard
        if len(heard) != len(unheard):
            return len(heard) > len(unheard)
        alive = [m for m in self.members if m not in self.ended]
        return alive[0] in heard if alive else not self.members
        ### END SOLUTION

    def form(self) -> list[Action]:
        """Begin the next generation, and end the round.

        Clause C2 says who gets which rank, and C3 whose state is the source.
        Example: generation 1 was a b c, b has ended; joined are e with step 9, c with
        6, a with 5 → Form(2, {0: a, 1: c, 2: e}, source c, …)
        """
        ### BEGIN SOLUTION elastic.resize
        #| who is taken, in which order, and who of them knows most? which fields belong
        #| to one round only?
        survivors = [m for m in self.members if m in self.joined]
        new = [m for m in self.joined if m not in self.members]
        taken = (survivors + new)[: self.max_members]
        refused = [m for m in self.joined if m not in taken]
        source = max(survivors or taken, key=self.joined.__getitem__)
        largest_shard = math.ceil(self.global_batch_size / len(taken))
        num_steps = math.ceil(largest_shard / self.microbatch_size)
        self.generation += 1
        self.members, self.joined, self.is_round = taken, {}, False
        formed = Form(self.generation, dict(enumerate(taken)), source, num_steps)
        full = f"{self.max_members} members train"
        return [formed, *(Refuse(member, full) for member in refused)]
        ### END SOLUTION

    def stop(self) -> list[Action]:
        """Give up, and decide nothing afterwards."""
        self.is_stopped = True
        few = f"{len(self.joined)} of at least {self.min_members} members joined"
        is_few = len(self.joined) < self.min_members
        why = few if is_few else "no majority of the last generation's members joined"
        return [Stop(f"{why} in {self.timeout_s:g} s")]


if __name__ == "__main__":
    try:
        print("\n".join(mosaic(resplit)))
    except NotImplementedError as missing:
        print(f"{missing} is not written yet")
