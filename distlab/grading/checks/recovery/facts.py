"""What was known when a Supervisor of 4.7 decided otherwise than it is due.

No diagnosis: each sentence is true of the event, whatever the mistake is.
"""

from __future__ import annotations

from distlab.grading.checks.recovery.contract import Due, SupervisorContract

_FACTS = {
    "late": "it reads no clock: stop() asks for the Tick, WakeAt(now_s + grace_s)",
    "begin": "at Begin n + num_standbys = {n} + {standbys} processes start",
    "done": "all members have ended with 0: no standby is needed any more",
    "some done": "a member that ended with 0 is done: its rank needs no process",
    "ready to form": "each rank can have a process now: form, at once",
    "ready": "a process that is ready waits until a group is needed and possible",
    "to form": "enough processes are ready for the empty ranks: form, at once",
    "generation": "each Form has the next number: this one is generation {form}",
    "goes on": "{failed} of max_failures = {failures} groups have failed without a new "
    "step, and {alive} processes are alive: it goes on",
    "failure": "{alive} of n + num_standbys = {wanted} processes are alive: "
    "{starts} to start, with numbers that none has had",
    "limited": "{alive} of n + num_standbys = {wanted} processes are alive: start as "
    "many as max_restarts still allows, {starts}",
    "limit": "max_restarts is {restarts} in {window:g} s: {alive} processes are "
    "alive, too few for {n} ranks",
    "stopping": "while it stops, only ends count; Finish follows the last of them",
    "stopped": "while it stops, only ends count; Finish follows the last of them",
    "code": "it stopped with exit code {code}, whatever ends afterwards",
    "interrupted": "an interruption stops all processes, with 128 + the signal's "
    "number",
    "frozen": "a frozen process gets SIGKILL: its Ended follows, and counts then",
    "loop": "{failures} groups have failed without a new step: stop all processes",
    "kill": "kill_at_s has come: SIGKILL to all that are alive",
    "tick": "this event asks for no action",
    "step": "this event asks for no action",
}
"""By the reason of what is due: the rule that decides, with its numbers."""


_OF_REPLACING = {
    "signals": "goes on",
    "finish": "goes on",
    "form": "to form",
    "members": "to form",
}
"""By the part that is not as it is due, where processes are replaced."""


def facts(contract: SupervisorContract, due: Due, part: str) -> str:
    """The rule that decides here, or nothing."""
    script, name = contract.script, due.reason
    if part == "late":
        name = "late"
    elif name == "stopped" and part == "finish" and due.finish is not None:
        name = "code"
    elif due.form and name == "ready":
        name = "ready to form"
    elif part == "generation":
        name = part
    elif name in ("failure", "limited"):
        name = _OF_REPLACING.get(part, name)
    return _FACTS.get(name, "").format(
        n=script.world_size,
        standbys=script.num_standbys,
        wanted=script.world_size + script.num_standbys,
        alive=len(contract.alive),
        starts=due.num_starts,
        restarts=script.max_restarts,
        window=script.window_s,
        failures=script.max_failures,
        code=due.finish,
        form=due.form,
        failed=contract.num_failed,
    )
