"""Gradient compression: send fewer bytes per step, without losing what wasn't sent.

Guide: phase4_production/guide/gradient_compression.md.
Source: Y. Lin et al., Deep Gradient Compression (arXiv 1712.01887), section 3.1;
S. P. Karimireddy et al., Error Feedback Fixes SignSGD (arXiv 1901.09847), algorithm 1;
T. Vogels et al., PowerSGD (arXiv 1905.13727), algorithms 1 and 2.
Symbols: n = comm.world_size; N = the elements of a bucket; k = those that a rank sends.
Cost: top-k sends (n-1)·k indices and values, an all_reduce 2(n-1)/n · N values; int8
sends 2(n-1)/n · N bytes.

    gradient        5  -1   2   1       gradient        1  -1   2   1
    + residual      0   0   0   0       + residual      0  -1   2   1
    = corrected     5  -1   2   1       = corrected     1  -2   4   2
    sent, k = 1     5                   sent, k = 1             4
    residual        0  -1   2   1       residual        1  -2   0   2

backward() calls a hook with a bucket whose gradients are ready; see 3.10. The hook
starts messages and returns a Work at once. Once its wait() returns, the sum over the
ranks is in bucket.flat, which may be float32, float64 or another floating-point dtype.
Given are fp16, bf16 and Sign, and:

    Later([work, …], finish)      a Work: its wait() waits for them and calls finish()
    Residuals().of(bucket)        what was kept, like bucket.flat; zeros at first
    Residuals().keep(bucket, t)   keep t, which is like bucket.flat; 0 for inf and nan
"""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.comm import Comm, ReduceOp, Work
from distlab.given.gradient_compression import (
    Bucket,
    Factors,
    Later,
    Residuals,
    join,
    split,
)


def largest(values: Tensor, ratio: float) -> Tensor:
    """Return the int32 indices of the k elements largest in magnitude, in any order.

    Given: `values` has one dimension and at least one element; 0 < ratio <= 1. A nan
    counts as larger than any number, as torch sorts it.

    C1 k is int(ratio * elements), but at least 1. The elements are chosen by magnitude,
       ignoring the sign, and ties may be broken in any way.
    Example: [1, -5, 2, 3, 0], ratio 0.4 → 1 and 3
    Check: distlab check 4.10
    """
    # TODO(gradient_compression.top_k)
    # how many, and by which order? what is int(0.01 * 30)?
    raise NotImplementedError("gradient_compression.top_k")


class TopK:
    """A comm_hook that sends only each rank's k largest gradients and their indices.

    In torch.distributed: no such hook is built in; see 4.18
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio}, must be above 0 and at most 1")
        self.ratio = ratio
        self.residuals = Residuals()  # of this rank

    def __call__(self, comm: Comm, bucket: Bucket) -> Work:
        """Start to send the largest gradients; the Work's wait() adds them up.

        Collective: all ranks call it with buckets of the same size, and wait for them
        in the same order. Two buckets may be in flight at the same time.

        C2 After wait(), bucket.flat contains the sum of everything the ranks sent. If
           several ranks sent the same element, their values are added. If no rank sent
           it, it is zero.
        C3 Whatever a rank didn't send is added to its gradient in the next step.
           Nothing is carried over for an element that it did send, even if the value
           was inf. The rest is kept in `self.residuals`, where a checkpoint finds it.
        C4 Each rank sends k indices of 4 bytes each and k values, and nothing else.
        C5 The call starts all its messages and returns immediately, because the rank
           waits only in wait().
        Cost: (n-1)·k·(4 + bytes of a value). Check: distlab check 4.10
        """
        # TODO(gradient_compression.top_k)
        # corrected = gradient + residual. what is sent, what is kept? all_gather has
        # async_op; every rank sends the same number of indices
        raise NotImplementedError("gradient_compression.top_k")


class Int8:
    """A comm_hook that sums one-byte integers, with one scale for all ranks.

    In torch.distributed: quantization hooks, which gather and do not sum
    """

    def __init__(self) -> None:
        self.residuals = Residuals()  # of this rank

    def __call__(self, comm: Comm, bucket: Bucket) -> Work:
        """Start to agree on the scale; the Work's wait() sends the integers.

        Collective, as TopK. torch.int8 holds -128 … 127, and a sum beyond that wraps
        around without an error, so more than 127 ranks are refused.

        A scale is what the number 1 stands for, and all ranks must have the same one.
        C1 Each element differs from the exact sum by at most n times the scale, which
           is the smallest scale that C2 allows for the values that the ranks want to
           send. A bucket of zeros stays zero. If any rank has an inf or nan, the bucket
           contains one on every rank, and the next bucket is correct again.
        C2 No int8 overflows, neither in a rank's own numbers nor in the sum, whatever
           values the ranks have and in any dtype. Beware that in 16 bits, rounding may
           push a quotient beyond its bound.
        C3 Each rank adds its rounding error to its gradient in the next step. Until
           then, it is kept in `self.residuals`, where a checkpoint finds it.
        C4 Each element is sent as a single byte in an all_reduce, and each bucket needs
           one more number for the scale.
        C5 The call starts its first message and returns immediately, because the rank
           waits only in wait().
        Example: two ranks, 10 and 4, levels 63, scale 10/63: 63 + 25 = 88 → 13.97
        Cost: 2(n-1)/n · N bytes, two collectives. Check: distlab check 4.14
        """
        if comm.world_size > 127:
            raise ValueError(f"int8 adds up at most 127 ranks, not {comm.world_size}")
        # TODO(gradient_compression.int8)
        # how do all ranks get one scale, and how large may one rank's numbers be? the
        # second collective belongs in finish. no int8 is inf, and MAX may lose a nan:
        # how do the other ranks hear of one?
        raise NotImplementedError("gradient_compression.int8")


class PowerSGD:
    """A comm_hook that sends each matrix M as P Qᵀ, two matrices with R columns.

    In torch.distributed: powerSGD_hook.powerSGD_hook
    """

    def __init__(self, rank: int = 4) -> None:
        if rank < 1:
            raise ValueError(f"rank is {rank}, must be at least 1")
        self.residuals = Residuals()  # of this rank
        self.factors = Factors(rank)  # Q of every matrix, the same on all ranks

    def __call__(self, comm: Comm, bucket: Bucket) -> Work:
        """Start to sum P; the Work's wait() sums Q.

        M is the gradient plus the residual, and each rank can multiply only its own M.
        The product M Q starts from the Q of the step before, and Mᵀ P gives the next Q.
        You decide what to sum and when, and at which moment to make the columns of P
        orthonormal, so that P Qᵀ stands for the sum of all M.
        Given: you use self.factors like self.residuals, but it holds a list, with one Q
        of shape (columns, R) for each matrix. split(bucket, t), with t like
        bucket.flat, returns its matrices, none or several, and a tensor with all other
        elements; join undoes this.

        C1 If the sum of all M has a matrix rank of R or less, bucket.flat equals that
           sum.
        C2 Parameters with fewer than two dimensions are summed exactly.
        C3 The residual is M - P Qᵀ / n, or zero for parameters that were summed
           exactly. It is kept in `self.residuals` and Q in `self.factors`, where a
           checkpoint finds them.
        C4 A rank sends only P, Q and the other elements, and does so in two
           all_reduces.
        C5 The call starts its first message and returns immediately, because the rank
           waits only in wait().
        Cost: 2(n-1)/n · R·(rows + columns) values for a matrix.
        Check: distlab check 4.15
        """
        # TODO(gradient_compression.powersgd)
        # which products are known before the messages, which only after the first one?
        # torch.linalg.qr(P).Q has orthonormal columns; it takes no tensor of 16 bits
        raise NotImplementedError("gradient_compression.powersgd")
