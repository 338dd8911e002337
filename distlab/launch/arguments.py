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

Starts one process per rank to run script.py, in the environment that torchrun would
give them. Defaults are in parentheses.

  -n, --nproc-per-node N number of ranks on this node (1), or auto, gpu or cpu for one
                         rank per device or core
  --max-restarts N       restart all ranks after a failure, at most N times (0). We
                         don't restart after exit code 2, which means that the script
                         was called incorrectly
  --monitor-interval S   check on the ranks every S seconds (0.1)
  --grace-period S       wait S seconds between SIGTERM and SIGKILL (30);
                         --shutdown-timeout does the same
  --signals-to-handle L  stop the job on these signals, such as SIGUSR1,SIGINT, and pass
                         them to the ranks unchanged. Without this option, Ctrl-C
                         reaches the ranks as SIGTERM instead of SIGINT, because a
                         script may save on SIGTERM
  --backend NAME         backend for messages, such as gloo, nccl or tcp (gloo)
  -m, --module           run script.py as a module, as python -m does
  --no-python            run script.py as a command, without Python
  --run-path             run script.py with runpy.run_path

Everything that the ranks print on either stream appears on stdout, with the rank at the
start of each line. Messages from the launcher itself go to stderr.

  --log-dir DIR          write a log for each rank, rank_<r>.log, to this folder
  -r, --redirects WHICH  hide stdout (1), stderr (2) or both (3), so that they're only
                         in the logs. You can choose by local rank, as in 0:3,1:1
  -t, --tee WHICH        show these streams and also keep them in the logs
  --local-ranks-filter L show only the output of these local ranks, such as 0,1
  --duplicate-stdout-filters, --duplicate-stderr-filters TEXTS
                         copy lines that contain one of these texts to
                         filtered_<stream>.log
  --monitor FOLDER       record the steps of all ranks without changing the script. To
                         see them, run `distlab top FOLDER`
  --explain-hangs        record the ranks' calls. If the ranks hang, say within about a
                         second which of them disagree, and in which lines
  --on-hang WHAT         what to do then: end the job (abort), treat it as a failure
                         (restart), or leave the ranks as they are (report)
  --no-progress S        say where every rank is after S seconds without a call (60)
  --hang-report FILE     also write the report, as JSON or (.html) as a timeline
  --hang-stacks          also print the Python stack of every rank
  --also PLACES          also send the records to tensorboard, prometheus[:PORT], or
                         by OTLP to the collector otlp[:[ADDRESS:]PORT]
  --role NAME            set ROLE_NAME for the ranks (default)

  --standby K            keep K spare processes on all nodes together. When a rank dies,
                         one of them takes its place, while the other ranks keep running
                         and no step is lost.
                         The script has to train with distlab.distributed.elastic, and
                         each process that we start later counts as a restart
  --elastic MIN:MAX      start MAX ranks on all nodes together, and continue with fewer
                         when some of them die or a node other than node 0 is lost.
                         This is an alternative to --standby. For each rank that ends, a
                         new one joins if --max-restarts allows it. To change the number
                         of ranks while the job runs, write it to LOG_DIR/ranks
  --global-batch-size N  with --elastic: number of samples per step over all ranks
  --microbatch-size N    with --elastic: number of samples per microbatch, which decides
                         how many steps the ranks accumulate gradients for
  --join-grace S         with --elastic: how long a smaller group waits for more ranks
                         to join (0.5)
  --freeze-timeout S     with --standby or --elastic: kill and replace a rank if it
                         completes no step for S seconds and for ten usual steps (10)

To use several nodes, start one agent on each of them. Under srun, you don't need any of
these flags.

  --nnodes N             number of nodes (1). With MIN:MAX, we start with MIN nodes if
                         the rest don't join in time, and a node that joins later takes
                         part after the next restart
  --last-call S          with MIN:MAX: how many seconds MIN nodes wait for others (30)
  --node-rank R          number of this node, counting from 0
  --master-addr ADDR     address of node 0
  --master-port PORT     port where the agents meet or, on a single node, port of the
                         store (a free one)
  --rdzv-backend c10d    make the node at --rdzv-endpoint node 0, and let it number the
                         others
  --rdzv-endpoint H:P    same as --master-addr H --master-port P
  --rdzv-id NAME         name of this job; agents with a different name are refused
  --rdzv-conf K=V,…      join_timeout, last_call_timeout, is_host, …
  --local-addr ADDR      this node's own address
  --standalone           use a single node, even if srun or the environment says
                         otherwise
  --start-timeout S      how many seconds the agents wait for one another (300)
  --node-timeout S       treat a node as lost after S seconds without a sign of it (15)

  --virtual-local-rank   set LOCAL_RANK to 0 and let each rank see only its own GPU
  --numa-binding HOW     keep each rank on the CPUs near its GPU, as torchrun does
  --start-method M       spawn, fork or forkserver; has no effect on scripts
  --event-log-handler H  null or console; has no effect either

Everything after script.py is passed to the script. You can also set torchrun's options
with environment variables such as PET_NNODES. The agents make their decisions with
tasks 3.17 and 3.18. To have them run your code: distlab use mine process_group
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
        raise LaunchError(
            "there is no script to run: python -m distlab.launch script.py"
        )
    return CommandLine(options.settings_of(said, srun), left[0], tuple(left[1:]))


def _take(left: list[str], said: dict[str, Any]) -> None:
    """Take one flag and its value from the front."""
    flag, has_value, text = left.pop(0).partition("=")
    if not flag.startswith("--") and len(flag) > 2:  # -r3
        flag, has_value, text = flag[:2], "=", flag[2:] + has_value + text
    name = options.find(flag)
    if options.OPTIONS[name].is_flag:
        if has_value:
            raise LaunchError(f"{flag} doesn't take a value, but got {text!r}")
        said[name] = True
        return
    if not has_value:
        if not left:
            raise LaunchError(f"{flag} needs a value")
        text = left.pop(0)
    said[name] = options.value(name, text, flag)
