"""Clipped sums of gradients whose floating-point sensitivity is proven.

**Claim.** Let a plan allow a change of 2s, where s = min(c, ℓ) for clipping thresholds
ℓ of devices and c of their records. With thresholds ℓ/(1 + e) and c/(1 + e), the sums
that this package computes in float32 change by at most 2s when one record, or one
device, is replaced. e is `bound.rounding_error(…).total`.

**Proof.** docs/explanation/privacy.md, "Sums in floating point", steps 1 to 8.
Every term of e is a function of `wflmc.sums.bound` that cites its step, and so does the
code that the step is about. Whatever decides how numbers are grouped is public: shapes,
thresholds, θ.

**Read in this order.**

1. `constants`: how many terms are added by float32, on a lattice, in a stage.
2. `bound`: e and its terms.
3. `pairs`: numbers of two float32 (step 2). `parts` cuts axes.
4. `lattices`: sums that are the same in any order (step 5).
5. `norms`, `clipping`: norms, clipping factors, clipping in pairs (steps 3, 4, 8).
6. `records`: sums over the records of a device (steps 1, 2).
7. `devices`: `Sum`, what is sent before noise, and sums over devices (steps 5, 7).
8. `reference`: what all of it computes, in float64 and a few lines.
9. `blocks`, `chains`: devices block by block, all chains at once.
10. The models: `gaussian`; `softmax_classes`, `softmax` for many chains on an
    accelerator with `softmax_gpu`, `softmax_rows` for devices of few rows (step 6);
    `custom` with `record_gradients` and `independence`, which refuses models in which
    one record could change the gradient of another.

Attacks on these sums are in tests/attacks (test_summation, test_worse_neighbours,
test_extreme_clips, test_overflow); tests/sums has one test per term of e that fails
without the term.
"""
