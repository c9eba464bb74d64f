/* The step's elementwise parts in one walk each, for a CPU: the functions of ops_torch.py, called by ops_native.py.

   Built twice by native.py, with REAL = float and REAL = double. A row (of a norm, of logits) is walked two or three
   times while it lies in the nearest caches, where torch's separate operations walk the whole buffer each time.
   Rows are split over `threads` in one fixed way, so the same number of threads gives the same bits.

   Sizes and strides count elements; rows are dense, `…_s` is the distance of two rows. Index pointers may be null. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t I;

#define ROWS _Pragma("omp parallel for schedule(static) num_threads(threads)")
#define LANES _Pragma("omp simd")
#define SUM(...) _Pragma(TEXT(omp simd reduction(+ : __VA_ARGS__)))
#define TEXT(...) TEXT_(__VA_ARGS__)
#define TEXT_(...) #__VA_ARGS__

#ifdef DOUBLE
typedef double REAL;
#define fast_exp exp
#else
typedef float REAL;
/* e^x, error below 2 units in the last place; 0 below -87.3 (no denormals); a NaN stays one. Plain arithmetic, so that
   a loop over it becomes vector code: x = n ln 2 + r, a Taylor polynomial of r, 2^n put into the exponent's bits. */
static inline float fast_exp(float x) {
  float top = x > 88.0f ? 88.0f : x;
  float low = top < -87.3f ? -87.3f : top;
  float n = rintf(low * 1.44269504f);
  float r = low - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  union { int32_t i; float f; } power;
  power.i = ((int32_t)n + 127) << 23;
  float y = p * power.f;
  return top < -87.3f ? 0.0f : y;
}
#endif

static inline REAL sigmoid(REAL x) { return 1 / (1 + fast_exp(-x)); }

static inline REAL inner(const REAL *a, const REAL *b, I n) {
  REAL sum = 0;
  SUM(sum) for (I c = 0; c < n; c++) sum += a[c] * b[c];
  return sum;
}

static inline REAL largest(const REAL *a, I n) {
  REAL top = -INFINITY;
  _Pragma("omp simd reduction(max : top)") for (I c = 0; c < n; c++) top = a[c] > top ? a[c] : top;
  return top;
}

void norm_fwd(I threads, I R, I H, const REAL *x, I x_s, const REAL *w, double eps, REAL *out, I out_s, const I *index) {
  ROWS for (I i = 0; i < R; i++) {
    const REAL *row = x + (index ? index[i] : i) * x_s;
    REAL *to = out + i * out_s;
    REAL scale = 1 / (REAL)sqrt(inner(row, row, H) / H + eps);
    if (w) {
      LANES for (I c = 0; c < H; c++) to[c] = row[c] * scale * w[c];
    } else {
      LANES for (I c = 0; c < H; c++) to[c] = row[c] * scale;
    }
  }
}

/* partial [threads, H], zeros: each thread's share of dw. */
void norm_bwd(I threads, I R, I H, const REAL *dy, I dy_s, const REAL *x, I x_s, const REAL *w, double eps, REAL *out,
              I out_s, REAL *partial, const REAL *add, I add_s, I keep, const I *index, REAL *y_out, I y_s) {
  _Pragma("omp parallel for schedule(static, 1) num_threads(threads)") for (I part = 0; part < threads; part++) {
    REAL *dw = partial + part * H;
    for (I i = R * part / threads; i < R * (part + 1) / threads; i++) {
      I j = index ? index[i] : i;
      const REAL *row = x + j * x_s, *d = dy + i * dy_s, *plus = add ? add + i * add_s : 0;
      REAL *to = out + j * out_s, *again = y_out ? y_out + i * y_s : 0;
      REAL squares = 0, dot = 0;
      SUM(squares, dot) for (I c = 0; c < H; c++) {
        squares += row[c] * row[c];
        dot += d[c] * w[c] * row[c];
      }
      REAL scale = 1 / (REAL)sqrt(squares / H + eps), back = dot * scale * scale * scale / H;
      if (keep && plus) {
        LANES for (I c = 0; c < H; c++) {
          REAL v = row[c], g = d[c];
          dw[c] += g * v * scale;
          to[c] += plus[c] + g * w[c] * scale - v * back;
          if (again) again[c] = v * scale * w[c];
        }
      } else if (keep) {
        LANES for (I c = 0; c < H; c++) {
          REAL v = row[c], g = d[c];
          dw[c] += g * v * scale;
          to[c] += g * w[c] * scale - v * back;
          if (again) again[c] = v * scale * w[c];
        }
      } else if (plus) {
        LANES for (I c = 0; c < H; c++) {
          REAL v = row[c], g = d[c];
          dw[c] += g * v * scale;
          to[c] = plus[c] + g * w[c] * scale - v * back;
          if (again) again[c] = v * scale * w[c];
        }
      } else {
        LANES for (I c = 0; c < H; c++) {
          REAL v = row[c], g = d[c];
          dw[c] += g * v * scale;
          to[c] = g * w[c] * scale - v * back;
          if (again) again[c] = v * scale * w[c];
        }
      }
    }
  }
}

void silu_mul_fwd(I threads, I R, I F, const REAL *gate_up, I s, REAL *out, I out_s) {
  ROWS for (I i = 0; i < R; i++) {
    const REAL *gate = gate_up + i * s, *up = gate + F;
    REAL *to = out + i * out_s;
    LANES for (I c = 0; c < F; c++) to[c] = gate[c] * sigmoid(gate[c]) * up[c];
  }
}

void silu_mul_bwd(I threads, I R, I F, REAL *gate_up, I s, const REAL *dact, I d_s) {
  ROWS for (I i = 0; i < R; i++) {
    REAL *gate = gate_up + i * s, *up = gate + F;
    const REAL *d = dact + i * d_s;
    LANES for (I c = 0; c < F; c++) {
      REAL g = gate[c], u = up[c], sig = sigmoid(g), silu = g * sig;
      gate[c] = d[c] * u * (sig + silu * (1 - sig));
      up[c] = d[c] * silu;
    }
  }
}

/* sign: 1 forward, -1 back. */
void rope(I threads, I R, I heads, I half, REAL *x, I x_s, I head_s, const REAL *cosine, const REAL *sine, I table_s,
          const I *position, I step, double sign) {
  REAL turn = (REAL)sign;
  ROWS for (I i = 0; i < R; i++) {
    const REAL *co = cosine + (position[i] + step) * table_s, *si = sine + (position[i] + step) * table_s;
    for (I h = 0; h < heads; h++) {
      REAL *a = x + i * x_s + h * head_s, *b = a + half;
      LANES for (I c = 0; c < half; c++) {
        REAL p = a[c], q = b[c], s = si[c] * turn;
        a[c] = p * co[c] - q * s;
        b[c] = q * co[c] + p * s;
      }
    }
  }
}

/* Where lse [B, n, L] keeps token t of head h. */
static inline I place(I t, I h, I n, I L) { return (t / L * n + h) * L + t % L; }

/* out0, dq0: rows of all tokens, or (all = 0) of the active ones.
   own: keys and values of steps 1…, R rows a step; row_s elements a row, values `half` behind keys. */
void merge(I threads, I R, I n, I m, I d, I L, I s, double scale, const REAL *q, const REAL *own, I row_s, I half,
           const REAL *out0, REAL *lse, REAL *out, const I *active, I all) {
  ROWS for (I i = 0; i < R; i++) {
    I t = active ? active[i] : i;
    for (I h = 0; h < n; h++) {
      const REAL *query = q + (i * n + h) * d, *base = out0 + ((all ? t : i) * n + h) * d;
      REAL *to = out + (i * n + h) * d, *sum = lse + place(t, h, n, L);
      REAL first = *sum, top = first, scores[s + 1], mass = 0;
      for (I j = 0; j < s; j++) {
        scores[j] = inner(query, own + (j * R + i) * row_s + h / (n / m) * d, d) * (REAL)scale;
        top = scores[j] > top ? scores[j] : top;
      }
      REAL floor_ = top == -INFINITY ? 0 : top;
      mass = (REAL)exp(first - floor_);
      for (I j = 0; j < s; j++) mass += (REAL)exp(scores[j] - floor_);
      REAL joined = floor_ + (REAL)log(mass), share = (REAL)exp(first - joined);
      LANES for (I c = 0; c < d; c++) to[c] = base[c] * share;
      for (I j = 0; j < s; j++) {
        const REAL *value = own + (j * R + i) * row_s + half + h / (n / m) * d;
        share = (REAL)exp(scores[j] - joined);
        LANES for (I c = 0; c < d; c++) to[c] += value[c] * share;
      }
      *sum = joined;
    }
  }
}

/* q, out, dout, dq [K, R, n, d] by block, of which step j is block (j + turn) % K; lses [K, B*n*L]. */
void merge_bwd(I threads, I R, I n, I m, I d, I L, I K, I s, I turn, I cells, double scale_, const REAL *q, REAL *own,
               I row_s, I half, const REAL *out, const REAL *dout, const REAL *lses, const REAL *dq0, REAL *dq,
               const I *active, I all) {
  REAL scale = (REAL)scale_;
  I group = n / m;
  ROWS for (I i = 0; i < R; i++) {
    I t = active ? active[i] : i;
    for (I g = 0; g < m; g++) {
      REAL dk[d], dv[d];
      memset(dk, 0, sizeof dk);
      memset(dv, 0, sizeof dv);
      for (I h = g * group; h < (g + 1) * group; h++) {
        for (I later = s; later < K; later++) {
          I at = (((later + turn) % K * R + i) * n + h) * d;
          const REAL *query = q + at, *grad = dout + at;
          REAL shared = inner(grad, out + at, d), lse = lses[later * cells + place(t, h, n, L)];
          REAL *to = dq + at;
          if (later == s) memcpy(to, dq0 + ((all ? t : i) * n + h) * d, d * sizeof *to);
          for (I j = later == s ? 1 : s; j <= s; j++) {
            if (!j) continue;
            const REAL *k = own + ((j - 1) * R + i) * row_s + g * d, *v = k + half;
            REAL p = (REAL)exp(inner(query, k, d) * scale - lse), score = p * (inner(grad, v, d) - shared) * scale;
            if (later == s) {
              LANES for (I c = 0; c < d; c++) to[c] += score * k[c];
            }
            if (j == s) {
              LANES for (I c = 0; c < d; c++) {
                dk[c] += score * query[c];
                dv[c] += p * grad[c];
              }
            }
          }
        }
      }
      if (s) {
        REAL *k = own + ((s - 1) * R + i) * row_s + g * d;
        memcpy(k, dk, sizeof dk);
        memcpy(k + half, dv, sizeof dv);
      }
    }
  }
}

/* Scores [m, R*group, keys] of R query rows, whose tokens are `token` and whose document starts at token `start`, become
   probabilities of the keys up to the query's own token; their log-sum-exps go into lse. */
void causal_fwd(I threads, I m, I R, I group, I keys, I start, I L, double scale_, REAL *scores, REAL *lse,
                const I *token) {
  REAL scale = (REAL)scale_;
  ROWS for (I i = 0; i < m * R * group; i++) {
    REAL *row = scores + i * keys, mass = 0;
    I t = token[i / group % R], seen = t - start + 1, h = i / (R * group) * group + i % group;
    REAL top = largest(row, seen);
    SUM(mass) for (I c = 0; c < seen; c++) {
      REAL e = fast_exp((row[c] - top) * scale);
      mass += e;
      row[c] = e;
    }
    REAL share = 1 / mass;
    LANES for (I c = 0; c < seen; c++) row[c] *= share;
    memset(row + seen, 0, (keys - seen) * sizeof *row);
    lse[place(t, h, m * group, L)] = top * scale + (REAL)log(mass);
  }
}

/* Scores become probabilities under the given lse, and dp (the gradient of those) the gradient of q·k; out and dout
   [R, m*group, d] of these rows. */
void causal_bwd(I threads, I m, I R, I group, I keys, I start, I L, I d, double scale_, REAL *scores, REAL *dp,
                const REAL *lse, const REAL *out, const REAL *dout, const I *token) {
  REAL scale = (REAL)scale_;
  ROWS for (I i = 0; i < m * R * group; i++) {
    REAL *row = scores + i * keys, *grad = dp + i * keys;
    I r = i / group % R, t = token[r], seen = t - start + 1, h = i / (R * group) * group + i % group;
    I at = (r * m * group + h) * d;
    REAL sum = lse[place(t, h, m * group, L)], shared = inner(dout + at, out + at, d);
    LANES for (I c = 0; c < seen; c++) {
      REAL e = fast_exp(row[c] * scale - sum);
      row[c] = e;
      grad[c] = e * (grad[c] - shared) * scale;
    }
    memset(row + seen, 0, (keys - seen) * sizeof *row);
    memset(grad + seen, 0, (keys - seen) * sizeof *grad);
  }
}

/* inverse int32 [T]: null if all rows are active. Step j of dq is block (j + turn) % K. */
void shift_sum(I threads, I T, I R, I K, I Nq, I Nkv, I turn, const REAL *dq, I dq_s, const REAL *dkv, I dkv_s,
               REAL *out, I out_s, const int32_t *inverse) {
  ROWS for (I j = 0; j < T + K - 1; j++) {
    REAL *to = out + j * out_s, *to_kv = to + Nq;
    memset(to, 0, (Nq + Nkv) * sizeof *to);
    for (I s = 0; s < K && s <= j; s++) {
      I t = j - s;
      if (t >= T) continue;
      I row = inverse ? inverse[t] : t;
      if (row >= 0) {
        const REAL *from = dq + ((s + turn) % K * R + row) * dq_s;
        LANES for (I c = 0; c < Nq; c++) to[c] += from[c];
      }
      if (s == 0 || row >= 0) {
        const REAL *from = dkv + (s ? T + (s - 1) * R + row : t) * dkv_s;
        LANES for (I c = 0; c < Nkv; c++) to_kv[c] += from[c];
      }
    }
  }
}

/* Logits become probabilities, entropy [M] theirs. */
void settle(I threads, I M, I D, REAL *teacher, REAL *entropy) {
  ROWS for (I i = 0; i < M; i++) {
    REAL *row = teacher + i * D, top = largest(row, D), mass = 0, mean = 0;
    SUM(mass, mean) for (I c = 0; c < D; c++) {
      REAL z = row[c] - top, e = fast_exp(z);
      mass += e;
      mean += e > 0 ? e * z : 0;
      row[c] = e;
    }
    REAL share = 1 / mass;
    LANES for (I c = 0; c < D; c++) row[c] *= share;
    entropy[i] = (REAL)log(mass) - mean * share;
  }
}

/* figures [3, cells]: cross-entropy, teacher entropy, "first choice is goal". */
void soft_ce(I threads, I R, I D, I cells, REAL *logits, I logits_s, const REAL *p, const REAL *entropy,
             const int32_t *slot, const I *goal, const REAL *weight, REAL *figures, const I *at) {
  ROWS for (I i = 0; i < R; i++) {
    REAL *row = logits + i * logits_s, *figure = figures + at[i], w = weight[i];
    if (w == 0) {
      memset(row, 0, D * sizeof *row);
      figure[0] = figure[cells] = figure[2 * cells] = 0;
      continue;
    }
    const REAL *t = p + slot[i] * D;
    REAL top = largest(row, D), mass = 0, mean = 0;
    figure[2 * cells] = goal[i] >= 0 && row[goal[i]] >= top;
    SUM(mass, mean) for (I c = 0; c < D; c++) {
      REAL z = row[c] - top, e = fast_exp(z);
      mass += e;
      mean += t[c] * z;
      row[c] = e;
    }
    REAL share = w / mass;
    LANES for (I c = 0; c < D; c++) row[c] = row[c] * share - t[c] * w;
    figure[0] = (REAL)log(mass) - mean;
    figure[cells] = entropy[slot[i]];
  }
}
