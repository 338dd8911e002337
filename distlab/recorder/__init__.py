"""Record where a rank waits, for any script that uses torch.distributed.

attach      begins in a rank, before its script imports torch
journal     writes down the calls that the rank makes
agreement   compares each collective with the other ranks' of this machine
recorder    posts what a rank waits for in the job's store, once it stands still

`distlab.flight` reads the posts and says whether the job hangs. Nothing here imports
more than torch, because every rank of every job loads it.
"""
