"""Fits the polynomials of math.h by Remez exchange and prints them, highest degree last, with the relative error before rounding.

    python3 src/simd/fit_polynomials.py        (needs mpmath; about a minute)
"""

from mpmath import mp, mpf, matrix, lu_solve, log, exp, expm1, log1p, tanh, atanh, sqrt, fabs, cos, pi, nstr
import struct

mp.dps = 60


def remez(f, weight, a, b, degree, samples=1500):
    """The polynomial p of `degree` with the least max |weight (f - p)| on [a, b], and that maximum."""
    a, b = mpf(a), mpf(b)
    n = degree + 2
    points = [(a + b) / 2 - (b - a) / 2 * cos(pi * (i + mpf("0.45")) / n) for i in range(n)]  # off centre: weights vanish at 0
    grid = [(a + b) / 2 - (b - a) / 2 * cos(pi * (i + mpf(1) / 2) / samples) for i in range(samples)]
    table = [(x, f(x), fabs(weight(x))) for x in grid]
    for _ in range(30):
        rows, right = [], []
        for i, x in enumerate(points):
            w = fabs(weight(x))
            rows.append([w * x**k for k in range(degree + 1)] + [mpf(-1) ** i])
            right.append(w * f(x))
        solution = lu_solve(matrix(rows), matrix(right))
        c, level = [solution[k] for k in range(degree + 1)], fabs(solution[degree + 1])

        def horner(x):
            r = mpf(0)
            for k in reversed(c):
                r = r * x + k
            return r

        errors = [(x, w * (y - horner(x))) for x, y, w in table]
        # One extremum per run of equal sign, then the n consecutive ones with the largest smallest error.
        runs = []
        for x, e in errors:
            if runs and (runs[-1][1] > 0) == (e > 0):
                if fabs(e) > fabs(runs[-1][1]):
                    runs[-1] = (x, e)
            else:
                runs.append((x, e))
        while len(runs) > n:
            runs.pop(0 if fabs(runs[0][1]) < fabs(runs[-1][1]) else -1)
        worst = max(fabs(e) for _, e in errors)
        if len(runs) < n or worst < level * mpf("1.0005"):
            break
        points = [x for x, _ in runs]
    return c, worst


def text(c, double):
    if double:
        return [float(x).hex() for x in c]
    return [struct.unpack("f", struct.pack("f", float(x)))[0].hex() + "f" for x in c]


def series(g, order):
    """g divided by its leading power stays exact near 0: switch to the Taylor series of g there."""
    coefficients = mp.taylor(g, 0, order + 40)[order:]

    def value(x):
        if fabs(x) < mpf("1e-3"):
            r = mpf(0)
            for k in reversed(coefficients[:24]):
                r = r * x + k
            return r
        return None

    return value


def show(name, f, weight, a, b, degree, double):
    c, worst = remez(f, weight, a, b, degree)
    print(f"{name}: degree {degree}, error 2^{nstr(log(worst, 2), 4)}")
    print("    " + ", ".join(text(c, double)))


LN2 = log(2)
HALF = LN2 / 2 * mpf("1.0001")
near_exp = series(lambda x: exp(x), 2)


def q_exp(r):  # (e^r - 1 - r) / r^2
    near = near_exp(r)
    return near if near is not None else (exp(r) - 1 - r) / r**2


def w_exp(r):  # relative to expm1, which is the stricter of the two users
    return r if fabs(r) < mpf("1e-20") else r**2 / expm1(r)


near_exp2 = series(lambda x: mpf(2) ** x, 1)


def q_exp2(t):  # (2^t - 1) / t
    near = near_exp2(t)
    return near if near is not None else expm1(t * LN2) / t


near_log = series(lambda x: log1p(x), 3)


def q_log(f):  # (log1p(f) - f + f^2/2) / f^3
    near = near_log(f)
    return near if near is not None else (log1p(f) - f + f**2 / 2) / f**3


def w_log(f):
    return f**3 / log1p(f) if fabs(f) > mpf("1e-20") else mpf("1e-40")


near_atanh = series(lambda s: atanh(s), 3)


def q_atanh(z):  # (2 atanh(s) - 2 s) / s^3 with z = s^2
    s = sqrt(z)
    near = near_atanh(s)
    return 2 * near if near is not None else (2 * atanh(s) - 2 * s) / s**3


near_tanh = series(lambda x: tanh(x), 3)


def q_tanh(z):  # (tanh(x) / x - 1) / x^2 with z = x^2
    x = sqrt(z)
    near = near_tanh(x)
    return near if near is not None else (tanh(x) / x - 1) / z


if __name__ == "__main__":
    low, high = sqrt(mpf(1) / 2) - 1, sqrt(mpf(2)) - 1
    for double in (False, True):
        t = "f64" if double else "f32"
        show(f"{t} exp", q_exp, w_exp, -HALF, HALF, 10 if double else 4, double)
        show(f"{t} exp2", q_exp2, lambda x: x / mpf(2) ** x, mpf("-0.5"), mpf("0.5"), 10 if double else 5, double)
        if double:
            top = ((sqrt(mpf(2)) - 1) / (sqrt(mpf(2)) + 1)) ** 2
            show("f64 log (in s^2)", q_atanh, lambda z: z, mpf(0), top, 6, double)
        else:
            show("f32 log1p of 0 to 1 (in s^2)", q_atanh, lambda z: z / 2, mpf(0), mpf(1) / 9, 4, double)
            show("f32 log", q_log, w_log, low, high, 8, double)
        edge = mpf("0.55") if double else mpf("0.625")
        show(f"{t} tanh (in x^2)", q_tanh, lambda z: z * sqrt(z) / tanh(sqrt(z)) if z > 0 else mpf(0) + mpf("1e-40"), mpf(0),
             edge**2, 10 if double else 4, double)
    print("ln2 f32:", [float(x).hex() for x in (mpf(float.fromhex("0x1.62ep-1")), LN2 - mpf(float.fromhex("0x1.62ep-1")))])
    hi = mpf(int(LN2 * 2**33)) / 2**33
    print("ln2 f64:", float(hi).hex(), float(LN2 - hi).hex())
