"""Parse the command line: our flags, the script, and the script's own arguments.

    python -m distlab.launch --nproc-per-node 4 train.py --epochs 3
    python -m distlab.launch --standalone --nproc_per_node=gpu -m package.train --lr 0.1

You can write flags with - or _. As with torchrun, everything after the script belongs
to the script, and PET_<NAME> in the environment sets an option of torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.launch import options
from distlab.launch.config import LaunchError

USAGE = """\
usage: python -m distlab.launch [flags] script.py [arguments of the script]

Starts the ranks of script.py, with the environment that torchrun gives them.

  -n, --nproc-per-node N ranks on this node (1), or auto, gpu, cpu for one on each
  --max-restarts N       restart all ranks after a failure, at most N times (0); exit
                         code 2 means that the script was called incorrectly, so we
                         don't restart
  --monitor-interval S   look at the ranks every S seconds (0.1)
  --grace-period S       seconds from SIGTERM to SIGKILL (30), or --shutdown-timeout
  --signals-to-handle L  signals that stop the job and reach the ranks unchanged, such
                         as SIGUSR1,SIGINT. Otherwise Ctrl-C, which is SIGINT, reaches
                         the ranks as SIGTERM, because a script may save on SIGTERM
  --backend NAME         gloo, nccl or tcp (gloo)
  -m, --module           script.py is the name of a module, as in python -m
  --no-python            script.py is a command; don't run it with Python
  --run-path             run it with runpy.run_path

Stdout shows what the ranks print on both streams, with the rank before each line;
what the launcher itself says is on stderr:

  --log-dir DIR          write rank_<r>.log to this folder
  -r, --redirects WHICH  don't show stdout (1), stderr (2), both (3), or by local
                         rank: 0:3,1:1; you'll find them only in the logs
  -t, --tee WHICH        show them as well as keeping them in the logs
  --local-ranks-filter L show only these local ranks, such as 0,1
  --duplicate-stdout-filters, --duplicate-stderr-filters TEXTS
                         copy lines that contain a text to filtered_<stream>.log
  --monitor FOLDER       record the steps of all ranks without changing the script;
                         `distlab top FOLDER` shows them
  --explain-hangs        record the ranks' calls. If the ranks hang, say within about
                         a second which of them disagree, and in which lines
  --on-hang WHAT         then end the job (abort), count it as a failure (restart), or
                         leave the ranks as they are (report)
  --no-progress S        after S seconds without a call, say where every rank is (60)
  --hang-report FILE     write the report as JSON too; --hang-stacks prints the stacks
  --also PLACES          send them to tensorboard, prometheus, prometheus:PORT too
  --role NAME            ROLE_NAME of the ranks (default)

  --standby K            keep K spare processes. When a rank dies, one of them takes its
                         place, while the others stay and no step is lost. The script
                         has to train with distlab.distributed.elastic, and each
                         process that we start later counts as a restart
  --elastic MIN:MAX      alternatively, start MAX ranks and continue with fewer when
                         some die. For each that ends, a new one joins if
                         --max-restarts allows it. To change the size while the job
                         runs, write a number to LOG_DIR/ranks
  --global-batch-size N  with --elastic: samples per step, over all ranks together
  --microbatch-size N    with --elastic: samples per microbatch, from which we tell the
                         ranks their number of accumulation steps
  --join-grace S         with --elastic: how long a smaller group waits for more (0.5)
  --freeze-timeout S     with both: kill and replace a rank that completes no step for
                         S seconds and for ten usual steps (10)

Several nodes, with one agent on each; under srun you need none of these:

  --nnodes N             number of nodes (1). With MIN:MAX, start with MIN nodes if the
                         rest don't join in time; a node that comes later takes part
                         after the next restart
  --last-call S          with MIN:MAX: seconds that MIN nodes wait for the others (30)
  --node-rank R          number of this node, from 0
  --master-addr ADDR     address of node 0
  --master-port PORT     on one node, the store's port (a free one); on several, where
                         the agents meet
  --rdzv-backend c10d    node 0 is the one at --rdzv-endpoint, and numbers the others
  --rdzv-endpoint H:P    same as --master-addr H --master-port P
  --rdzv-id NAME         name of this job; agents with another name are refused
  --rdzv-conf K=V,…      join_timeout, last_call_timeout, is_host, …
  --local-addr ADDR      this node's own address
  --standalone           use one node, whatever srun and the environment say
  --start-timeout S      seconds that the agents wait for one another (300)
  --node-timeout S       seconds of silence after which a node is lost (15)

  --virtual-local-rank   LOCAL_RANK is 0, and each rank sees only its own GPU
  --numa-binding HOW     keep each rank on the CPUs near its GPU, as torchrun does
  --start-method M       spawn, fork or forkserver; makes no difference for scripts
  --event-log-handler H  null or console; makes no difference either

Everything after script.py belongs to the script. PET_NNODES and so on set options of
torchrun. The agents decide with tasks 3.17 and 3.18: `distlab use mine
process_group` makes them run your code.
"""


class HelpAsked(Exception):  # noqa: N818 - no error
    """Raised when the user passes `--help`."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: settings by LaunchConfig's names, the script, the rest."""

    settings: dict[str, Any]
    script: str
    arguments: tuple[str, ...]

    @property
    def misplaced(self) -> str:
        """Return a launcher's option after the script, if there is none before it.

        The script gets this option and may even know it. If it doesn't, this explains
        its error.
        """
        if self.settings:
            return ""
        names = ("--nproc", "--nnodes", "--node-rank", "--node_rank")
        flags = (text.partition("=")[0] for text in self.arguments)
        return next((flag for flag in flags if flag.startswith(names)), "")


def parse(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    srun: Mapping[str, Any] | None = None,
) -> CommandLine:
    """Read the command line; `environment` and `srun` may fill in what it leaves out.

    Raises:
        LaunchError: a flag is unknown or has an invalid value, or no script is named.
        HelpAsked: the user wants to see USAGE.
    """
    left = list(arguments)
    said = options.from_environment(environment or {})
    while left and left[0].startswith("-") and left[0] != "--":
        if left[0] in ("-h", "--help"):
            raise HelpAsked
        _take(left, said)
    if left and left[0] == "--":
        del left[0]
    if not left:
        raise LaunchError("no script is named: python -m distlab.launch script.py")
    return CommandLine(options.settings_of(said, srun), left[0], tuple(left[1:]))


def _take(left: list[str], said: dict[str, Any]) -> None:
    """Take one flag and its value from the front."""
    flag, has_value, text = left.pop(0).partition("=")
    if not flag.startswith("--") and len(flag) > 2:  # -r3
        flag, has_value, text = flag[:2], "=", flag[2:] + has_value + text
    name = options.find(flag)
    if options.OPTIONS[name].is_flag:
        if has_value:
            raise LaunchError(f"{flag} takes no value, but got {text!r}")
        said[name] = True
        return
    if not has_value:
        if not left:
            raise LaunchError(f"{flag} has no value")
        text = left.pop(0)
    said[name] = options.value(name, text, flag)
