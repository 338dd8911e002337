"""A training's state on disk: what it consists of, and how all ranks save and load it.

How this works. A run has parts with a state: model, optimizer, loader. Each file knows
only the ones above it:

    files.py            the files of one checkpoint, and how the ranks exchange news
    training_state.py   a run's state as plain data, and which rank holds which shard
    named_run.py        the same state under the names of a model's state_dict
    saved_run.py        save and resume a run on all ranks together

`distlab.dcp` reads and writes this state in torch.distributed.checkpoint's format.
"""
