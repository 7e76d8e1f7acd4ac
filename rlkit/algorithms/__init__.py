"""Algorithms as pure functions over tensors: no models, no state, no files.

Shape letters: B rollouts, T response tokens, V vocabulary. Masks are true where the policy sampled a token; what
stands elsewhere never reaches a result or a gradient, not even as NaN. Functions keep the dtype they are given
(float64 works) except that sums over half-precision numbers are made and returned in float32.
"""
