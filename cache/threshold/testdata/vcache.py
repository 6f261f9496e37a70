#!/usr/bin/env python3
"""Writes vcache.json: vCache's estimates for some histories, computed another way than Go does.

The likelihood is maximised by scipy's general optimiser (BFGS, then Nelder and Mead from there), the variance comes from
a numeric inverse of the Hessian, Φ⁻¹ from scipy.stats. Formulas: Schroeder et al., arXiv 2502.03771. Run with numpy
and scipy (2.4.6 and 1.17.1 wrote what is committed): python3 vcache.py > vcache.json
"""
import json
import math
import random

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import norm

TABLE_N = [6, 10, 15, 20, 30, 40, 48]
TABLE_V = [0.0354, 0.0194, 0.0093, 0.0131, 0.0080, 0.0052, 0.0153]
GRID = np.linspace(1e-6, 1 - 1e-6, 50)


def fit(observed):
    s = np.array([0.0, 1.0] + [x for x, _ in observed])
    c = np.array([0.0, 1.0] + [float(y) for _, y in observed])
    n = len(s)
    wrong, right = s[c == 0].max(), s[c == 1].min()
    if wrong <= right:  # separated: the curve becomes a step in the middle of the gap
        return {"n": n, "t": (wrong + right) / 2, "gamma": None, "deviation": math.sqrt(np.interp(n, TABLE_N, TABLE_V))}

    def loss(w):
        z = w[0] + w[1] * s
        return -(c * z - np.logaddexp(0, z)).sum()

    w = minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-12}).x
    w = minimize(loss, w, method="Nelder-Mead", options={"xatol": 1e-13, "fatol": 1e-15, "maxiter": 20000, "maxfev": 20000}).x
    b, gamma = w[0], max(w[1], 1e-6)
    t = min(max(-b / gamma, 0.0), 1.0)
    x = np.stack([np.ones(n), s], axis=1)
    p = expit(b + gamma * s)
    h = x.T @ np.diag(p * (1 - p)) @ x
    g = np.array([-1 / gamma, b / gamma**2])
    return {"n": n, "t": t, "gamma": gamma, "deviation": math.sqrt(g @ np.linalg.inv(h) @ g)}


def tau(f, s, delta):
    if f["n"] < 6:
        return 1.0
    least = math.inf
    for e in GRID:
        t = min(max(f["t"] + norm.ppf(1 - e) * f["deviation"], 0.0), 1.0)
        if f["gamma"] is None:
            l = 1.0 if s > t else 0.0 if s < t else 0.5
        else:
            l = expit(f["gamma"] * (s - t))
        least = min(least, 1 - delta / (1 - (1 - e) * l))
    return least


def histories():
    yield []
    yield [(0.9, True)] * 3
    yield [(0.9, True)] * 4
    yield [(0.5, False), (0.6, False), (0.8, True), (0.9, True)]
    yield [(0.8, True), (0.85, False), (0.9, True), (0.7, False), (0.95, True), (0.75, True)]
    yield [(0.9, False), (0.9, True), (0.9, True), (0.9, True)]
    yield [(0.9, False)] * 8
    yield [(0.6, True), (0.95, False)] * 5  # more similar is worse: γ < 0 but for the seeds
    rng = random.Random(77)
    for n in (6, 8, 13, 18, 25, 35, 45, 64):
        for middle, steep in ((0.7, 15), (0.85, 40), (0.5, 4)):
            yield [(s, rng.random() < 1 / (1 + math.exp(-steep * (s - middle)))) for s in (round(rng.uniform(0.4, 1), 3) for _ in range(n))]
    for n in (4, 7, 11, 28, 46, 60):  # separated
        yield [(s, s > 0.8) for s in (round(rng.uniform(0.5, 1), 3) for _ in range(n))]


def main():
    out = []
    for h in histories():
        f = fit(h)
        taus = [[s, d, tau(f, s, d)] for s in (0.3, 0.6, 0.8, 0.9, 0.97, 1.0) for d in (0.01, 0.02, 0.1)]
        out.append({"observed": [[s, bool(y)] for s, y in h], "fit": f, "taus": taus})
    print("[\n" + ",\n".join(json.dumps(o) for o in out) + "\n]")


main()
