"""The book of mistakes: name a difference by the wrong solution that leaves the same.

How this works. A judge finds that the ranks' values aren't the expected ones, and says
what they are (`NotYetError.difference`). It doesn't know why. The catalogue does: its
wrong solutions stand there with the misconception behind each. So we play those of the
same clause in the same runs, and let the same judge look at them. The one that leaves
the very values that the learner's ranks left has the learner's mistake, and its
misconception names the verdict.

    learner's record ── judge ── difference ─┐
                                             ├─ alike: the mistake has a name
    GA25's record ───── judge ── difference ─┘

Playing all candidates takes a few tenths of a second, so we do it once, with a seed of
the book's own, and keep a mark of each difference in the state folder. A verdict with
another seed plays the learner's code once more, with the book's.

If solutions of two misconceptions leave the same values, the other world sizes of the
clause decide. If they don't either, we name none: a wrong name costs a learner more
time than a missing one. The verdict then keeps the facts that the judge stated.

marks.py   what of a difference is kept, and when two are alike
plays.py   the wrong solutions, one after another, in one run of ranks
names.py   the verdict under its name
"""
