// Attention with positions on a CPU. native.py compiles this file for the machine it runs on; it needs no library.
//
//     score_ij = q_i.k_j + sum_u D_u (g_u + sum_{v<=u} M_uv D_v) + c |D| + bias_ij,   D = r_j - r_i,   out = softmax v
//
// Scores are formed from D itself, so they are exact at any size. Everything is transposed: a block holds the scores of
// up to QB queries side by side in vectors, one row for each key. Keys and values are then read where they are, a number
// at a time, in any order, which makes lists of keys as cheap as all of them. Softmax runs over KEYS keys at a time.
//
// B batch, H heads, n queries, N keys, h query/key size, w value size, P position dims, f coefficients.
// They come in up to PARTS tensors.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __SSE__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // floats of a vector; vectors of a row that stay in registers
#elif defined(__AVX__)
constexpr int LANES = 8, WIDE = 2;
#else
constexpr int LANES = 4, WIDE = 4;
#endif
constexpr int QB = 64, KEYS = 100, MOST_DIMS = 4, PARTS = 3;  // KEYS rows of scores fit in the smallest cache
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline vec all(float x) { return x - vec{}; }
static inline vec& at(float* x) { return *(vec*)x; }
static inline vec get(const float* x) { return *(const vec*)x; }

// While it lives, numbers too small for full precision are 0 in this thread: they take many times as long, and
// gradients of a model that has learned its samples are full of them.
struct NoSubnormals {
#ifdef __SSE__
  const unsigned before = _mm_getcsr();
  NoSubnormals() { _mm_setcsr(before | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(before); }
#endif
};

// The larger of a and b; b where one of them is NaN.
static inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// exp of numbers up to a little above 0; NaN stays NaN. Below -40 it is 0: smaller weights would make subnormal products,
// which are slow where `NoSubnormals` does nothing.
static inline vec exponential(vec x) {
#if defined(__AVX512F__)
  const vec whole = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
#else
  const ints none = x < all(-40.0f);
  x = larger(all(-40.0f), x);
  const vec magic = all(12582912.0f), whole = (x * 1.44269504088896341f + magic) - magic;
#endif
  const vec r = x - whole * 0.69314718055994531f;
  vec y = all(1.9875691500e-4f);
#pragma GCC unroll 7
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
    y = y * r + c;
#if defined(__AVX512F__)
  const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-40.0f), _CMP_NLT_UQ);  // NaN too
  return (vec)_mm512_maskz_scalef_ps(some, (__m512)y, (__m512)whole);
#else
  return none ? vec{} : (vec)((ints)y + (__builtin_convertvector(whole, ints) << 23));
#endif
}

// What is subtracted from scores whose largest is x: 0 where all of them are hidden.
static inline vec finite(vec x) { return x == -INF ? vec{} : x; }

struct Strided {  // a tensor (B, H, rows, columns) of floats or bytes; strides count elements, and those of rows are 1
  const void* data;
  int64_t stride[4];
  const float* row(int64_t b, int64_t h, int64_t i) const {
    return (const float*)data + b * stride[0] + h * stride[1] + i * stride[2];
  }
};

struct Attention {  // as native.py fills it, but for the scale
  Strided q, k, v, c[PARTS], matrix, bias, mask;  // c (B, H, n, f), matrix (1, 1, f, numbers of a form), bias and mask (B, H, n, N)
  Strided at, to, at_low, to_low;              // positions (B, 1, n or N, P), NaN for none, and what float32 rounds away
  Strided out, norm;                           // (B, H, n, w) and (B, H, n, 2): largest score, 1 / sum of exp; not for inference
  Strided dout, dq, dk, dv, dc[PARTS];
  Strided query_tiles, key_tiles, needed;      // (B, H, Q, s), (B, H, T, s) int32, -1 for none; (B, H, Q, T) bytes
  int64_t B, H, n, N, h, w, f[PARTS], P, has_distance, has_lists, tiles, tile_size, key_tile_count, key_tile_size, threads;
  float scale;
};

static inline int numbers_of(const Attention& A) { return A.c[0].data ? A.P * (A.P + 3) / 2 + A.has_distance : 0; }

// Products. `a` holds a pointer to each row of the keys or values; ROWS of them share what vectors hold.

// c[r][i] = sum_d a[r][d] b[d][i]
template <int WIDTH, int ROWS>
static inline void by_rows(const float* const* a, int size, const float* b, float* c) {
  vec sum[ROWS][WIDTH] = {};
  for (int d = 0; d < size; d++) {
    vec y[WIDTH];
    for (int v = 0; v < WIDTH; v++) y[v] = get(b + d * QB + v * LANES);
    for (int r = 0; r < ROWS; r++) {
      const vec x = all(a[r][d]);
      for (int v = 0; v < WIDTH; v++) sum[r][v] += x * y[v];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) at(c + r * QB + v * LANES) = sum[r][v];
}

// c[d][i] += sum_j a[j][d] p[j][i], for ROWS sizes d
template <int WIDTH, int ROWS>
static inline void over_rows(const float* const* a, int first, int count, const float* p, float* c) {
  vec sum[ROWS][WIDTH] = {};  // by itself: a sum of a million numbers one by one would lose many digits
  for (int j = 0; j < count; j++) {
    vec y[WIDTH];
    for (int v = 0; v < WIDTH; v++) y[v] = get(p + j * QB + v * LANES);
    for (int r = 0; r < ROWS; r++) {
      const vec x = all(a[j][first + r]);
      for (int v = 0; v < WIDTH; v++) sum[r][v] += x * y[v];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) at(c + r * QB + v * LANES) += sum[r][v];
}

// c[j][d] += sum_i p[j][i] b[i][d], rows of b and c `ld` apart
template <int WIDTH, int ROWS>
static inline void over_queries(const float* p, int count, const float* b, float* const* c, int ld) {
  vec sum[ROWS][WIDTH] = {};
  for (int i = 0; i < count; i++) {
    vec y[WIDTH];
    for (int v = 0; v < WIDTH; v++) y[v] = get(b + i * ld + v * LANES);
    for (int r = 0; r < ROWS; r++) {
      const vec x = all(p[r * QB + i]);
      for (int v = 0; v < WIDTH; v++) sum[r][v] += x * y[v];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) at(c[r] + v * LANES) += sum[r][v];
}

// Calls f<vectors>(first vector) for runs of at most WIDE vectors.
template <class F>
static inline void strips(int vectors, F f) {
  for (int v = 0; v < vectors; v += WIDE) {
    const int left = vectors - v;
    if (left >= WIDE) f(std::integral_constant<int, WIDE>(), v * LANES);
    else if (left == 1) f(std::integral_constant<int, 1>(), v * LANES);
    else if (left == 2) f(std::integral_constant<int, 2>(), v * LANES);
    else f(std::integral_constant<int, WIDE < 3 ? 1 : 3>(), v * LANES);
  }
}

// Calls f<rows>(first row) for runs of rows.
template <class F>
static inline void runs(int rows, F f) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) f(std::integral_constant<int, 6>(), r);
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>(), r);
  for (; r + 2 <= rows; r += 2) f(std::integral_constant<int, 2>(), r);
  for (; r < rows; r++) f(std::integral_constant<int, 1>(), r);
}

static void scores_of(const float* const* a, int rows, int size, const float* b, float* c, int vectors) {
  strips(vectors, [&](auto width, int o) {
    runs(rows, [&](auto count, int r) { by_rows<width(), count()>(a + r, size, b + o, c + r * QB + o); });
  });
}
static void sums_of(const float* const* a, int rows, int size, const float* p, float* c, int vectors) {
  strips(vectors, [&](auto width, int o) {
    runs(size, [&](auto count, int d) { over_rows<width(), count()>(a, d, rows, p + o, c + d * QB + o); });
  });
}
static void gather_back(const float* p, int rows, int queries, const float* b, float* const* c, int ld) {
  strips(ld / LANES, [&](auto width, int o) {
    runs(rows, [&](auto count, int r) {
      float* into[count()];
      for (int x = 0; x < count(); x++) into[x] = c[r + x] + o;
      over_queries<width(), count()>(p + r * QB, queries, b + o, into, ld);
    });
  });
}

static inline int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

// What one thread works with: a block of queries of one head, and a run of the keys that it looks at.
struct Block {
  const Attention& A;
  std::vector<float> memory;
  std::vector<int32_t> all_keys;  // those that this block of queries looks at
  std::vector<int32_t> every;     // 0 .. N - 1
  std::vector<float> packed;      // keys and values of the head side by side, where several blocks read them
  int32_t queries[QB];
  int b = -1, h = -1, count, vectors, numbers;
  float *q, *form, *where, *where_low, *s;  // (h, QB), (numbers, QB), (P, QB), (P, QB), (KEYS, QB)
  const float *krows[KEYS], *vrows[KEYS];
  int placed, which[KEYS];  // keys of the run with a position: how many, which, and where
  float there[KEYS][MOST_DIMS], there_low[KEYS][MOST_DIMS];

  Block(const Attention& A, size_t more) : A(A), numbers(numbers_of(A)) {
    const size_t rows = A.h + numbers + 2 * A.P + KEYS;
    memory.resize(rows * QB + more + LANES);
    q = (float*)(((uintptr_t)memory.data() + 4 * LANES - 1) / (4 * LANES) * (4 * LANES));
    form = q + A.h * QB, where = form + numbers * QB, where_low = where + A.P * QB, s = where_low + A.P * QB;
  }
  float* rest() { return s + KEYS * QB; }

  // Which queries and keys: those of a tile and the tiles that it needs, or a run of queries and all keys.
  void choose(int sample, int head, int tile, int part) {
    const bool is_apart = A.k.stride[2] != A.h || A.v.stride[2] != A.w;
    if (is_apart && (b != sample || h != head) && A.n > QB) {  // rows far apart would share few lines of the cache
      packed.resize((size_t)A.N * (A.h + A.w));
      for (int j = 0; j < A.N; j++) {
        std::memcpy(packed.data() + (size_t)j * A.h, A.k.row(sample, head, j), sizeof(float) * A.h);
        std::memcpy(packed.data() + (size_t)A.N * A.h + (size_t)j * A.w, A.v.row(sample, head, j), sizeof(float) * A.w);
      }
    }
    b = sample, h = head, count = 0;
    if (!A.has_lists) {
      for (int i = part * QB; i < A.n && count < QB; i++) queries[count++] = i;
      if (every.empty())
        for (int j = 0; j < A.N; j++) every.push_back(j);
    } else {
      const int32_t* index = (const int32_t*)A.query_tiles.row(b, h, tile);
      for (int i = part * QB; i < A.tile_size && i < (part + 1) * QB; i++)
        if (index[i] >= 0) queries[count++] = index[i];
      all_keys.clear();
      const uint8_t* needed =
          (const uint8_t*)A.needed.data + b * A.needed.stride[0] + h * A.needed.stride[1] + tile * A.needed.stride[2];
      for (int t = 0; t < A.key_tile_count; t++) {
        if (!needed[t]) continue;
        const int32_t* index = (const int32_t*)A.key_tiles.row(b, h, t);
        for (int x = 0; x < A.key_tile_size; x++)
          if (index[x] >= 0) all_keys.push_back(index[x]);
      }
    }
    vectors = (count + LANES - 1) / LANES;
    std::memset(q, 0, sizeof(float) * QB * (A.h + numbers + 2 * A.P));
    for (int i = 0; i < count; i++) {
      const float* row = A.q.row(b, h, queries[i]);
      for (int d = 0; d < A.h; d++) q[d * QB + i] = row[d] * A.scale;
      if (!numbers) continue;
      const float* r = A.at.row(b, 0, queries[i]);
      if (r[0] != r[0]) continue;  // without a position: a form of zeros
      for (int part = 0, row = 0; part < PARTS; part++)
        for (int x = 0; x < A.f[part]; x++, row++)
          for (int f = 0; f < numbers; f++)
            if (const float factor = A.matrix.row(0, 0, row)[f])
              form[f * QB + i] += A.c[part].row(b, h, queries[i])[x] * factor;
      for (int u = 0; u < A.P; u++) where[u * QB + i] = r[u];
      if (A.at_low.data)
        for (int u = 0; u < A.P; u++) where_low[u * QB + i] = A.at_low.row(b, 0, queries[i])[u];
    }
  }
  const std::vector<int32_t>& keys() const { return A.has_lists ? all_keys : every; }

  // Calls f(key of the run, D) for the keys with a position and the queries of the vector at o.
  template <int P, class F>
  inline __attribute__((always_inline)) void differences(int o, F f) {
    vec x[P], low[P];
    for (int u = 0; u < P; u++) x[u] = get(where + u * QB + o), low[u] = get(where_low + u * QB + o);
    const bool has_low = A.to_low.data;
    for (int index = 0; index < placed; index++) {
      vec d[P];
#pragma GCC unroll 4
      for (int u = 0; u < P; u++) d[u] = all(there[index][u]) - x[u];
      if (has_low) {
#pragma GCC unroll 4
        for (int u = 0; u < P; u++) d[u] += all(there_low[index][u]) - low[u];
      }
      f(which[index], d);
    }
  }
  // Loops over dimensions are unrolled, so that D and the form stay in registers.
  template <int P>
  static vec length(const vec* d) {
    vec sum = d[0] * d[0];
#pragma GCC unroll 4
    for (int u = 1; u < P; u++) sum += d[u] * d[u];
    for (int l = 0; l < LANES; l++) sum[l] = std::sqrt(sum[l]);
    return sum;
  }
  static constexpr int slope(int u) { return u * (u + 3) / 2; }  // where the numbers of a coordinate begin in a form
  template <int P, bool DISTANCE>
  void add_form(int o) {
    vec c[slope(P) + DISTANCE];
    for (int f = 0; f < slope(P) + DISTANCE; f++) c[f] = get(form + f * QB + o);
    differences<P>(o, [&](int j, const vec* d) {
      vec sum = get(s + j * QB + o);
#pragma GCC unroll 4
      for (int u = 0; u < P; u++) {
        vec y = c[slope(u)];
#pragma GCC unroll 4
        for (int v = 0; v <= u; v++) y += c[slope(u) + 1 + v] * d[v];
        sum += y * d[u];
      }
      if constexpr (DISTANCE) sum += c[slope(P)] * length<P>(d);
      at(s + j * QB + o) = sum;
    });
  }
  // Adds to the gradient (f, QB) of the form: ds times the functions of D, summed over keys.
  template <int P, bool DISTANCE>
  void sum_form(int o, const float* ds, float* grad) {
    vec sum[slope(P) + DISTANCE] = {};
    differences<P>(o, [&](int j, const vec* d) {
      const vec g = get(ds + j * QB + o);
#pragma GCC unroll 4
      for (int u = 0; u < P; u++) {
        const vec t = g * d[u];
        sum[slope(u)] += t;
#pragma GCC unroll 4
        for (int v = 0; v <= u; v++) sum[slope(u) + 1 + v] += t * d[v];
      }
      if constexpr (DISTANCE) sum[slope(P)] += g * length<P>(d);
    });
    for (int f = 0; f < slope(P) + DISTANCE; f++) at(grad + f * QB + o) += sum[f];
  }
  // Calls f(P, whether forms have a distance, o) for each vector of queries.
  template <class F>
  void with_positions(F f) {
    for (int o = 0; numbers && o < vectors * LANES; o += LANES)
      if (A.has_distance) with_dims(f, std::true_type(), o);
      else with_dims(f, std::false_type(), o);
  }
  template <class F, class D>
  void with_dims(F f, D distance, int o) {
    if (A.P == 1) f(std::integral_constant<int, 1>(), distance, o);
    else if (A.P == 2) f(std::integral_constant<int, 2>(), distance, o);
    else if (A.P == 3) f(std::integral_constant<int, 3>(), distance, o);
    else f(std::integral_constant<int, 4>(), distance, o);
  }

  // The scores of a run of keys: (rows, QB).
  void scores(const int32_t* keys, int rows) {
    placed = 0;
    for (int j = 0; j < rows; j++) {
      if (packed.empty()) {
        krows[j] = A.k.row(b, h, keys[j]), vrows[j] = A.v.row(b, h, keys[j]);
      } else {
        krows[j] = packed.data() + (size_t)keys[j] * A.h;
        vrows[j] = packed.data() + (size_t)A.N * A.h + (size_t)keys[j] * A.w;
      }
      const float* r = numbers ? A.to.row(b, 0, keys[j]) : nullptr;
      if (!r || r[0] != r[0]) continue;
      for (int u = 0; u < A.P; u++) there[placed][u] = r[u];
      if (A.to_low.data)
        for (int u = 0; u < A.P; u++) there_low[placed][u] = A.to_low.row(b, 0, keys[j])[u];
      which[placed++] = j;
    }
    scores_of(krows, rows, A.h, q, s, vectors);
    with_positions([&](auto dims, auto distance, int o) { add_form<dims(), distance()>(o); });
    if (A.bias.data)
      for (int i = 0; i < count; i++) {
        const float* row = A.bias.row(b, h, queries[i]);
        for (int j = 0; j < rows; j++) s[j * QB + i] += row[keys[j] * A.bias.stride[3]];
      }
    if (!A.mask.data) return;
    const bool is_padding = !A.mask.stride[2];  // all queries see the same keys
    for (int i = 0; i < (is_padding ? 1 : count); i++) {
      const uint8_t* row = (const uint8_t*)A.mask.data + b * A.mask.stride[0] + h * A.mask.stride[1] +
                           queries[i] * A.mask.stride[2];
      for (int j = 0; j < rows; j++)
        if (!row[keys[j] * A.mask.stride[3]]) std::fill_n(s + j * QB + i, is_padding ? QB : 1, -INF);
    }
  }
};

// Into runs of how many keys those of a block are cut: of nearly equal length.
static int run_of(int size) { return (size + (size + KEYS - 1) / KEYS - 1) / ((size + KEYS - 1) / KEYS); }

// How many blocks of queries a thread takes at a time: those of a head, which share its keys, if there are heads enough.
static int chunk_of(const Attention& A, int64_t of_head) {
  int64_t chunk = of_head;
  while (chunk > 1 && A.B * A.H * of_head < 8 * A.threads * chunk) chunk = (chunk + 1) / 2;
  return (int)chunk;
}

static int parts_of(const Attention& A) { return ((A.has_lists ? A.tile_size : A.n) + QB - 1) / QB; }

// Both return whether there was memory enough.
extern "C" int parapos_forward(const Attention* attention, float scale) {
  Attention A = *attention;
  A.scale = scale;
  const int parts = parts_of(A), tiles = A.tiles, chunk = chunk_of(A, (int64_t)tiles * parts);
  std::atomic<int> good(1);
#pragma omp parallel num_threads(A.threads)
  {
    const NoSubnormals flush;
    std::optional<Block> room;
#pragma omp for schedule(dynamic, chunk) collapse(4)
    for (int b = 0; b < A.B; b++)
      for (int h = 0; h < A.H; h++)
        for (int tile = 0; tile < tiles; tile++)
          for (int part = 0; part < parts; part++) try {
            if (!room) room.emplace(A, (size_t)(A.w + 2) * QB);
            Block& x = *room;
            float *sum = x.rest(), *top = sum + QB, *out = top + QB;  // (QB,), (QB,), (w, QB)
            x.choose(b, h, tile, part);
            const auto& keys = x.keys();
            const int size = (int)keys.size(), run = size ? run_of(size) : 0;
            for (int i = 0; i < QB; i++) top[i] = -INF, sum[i] = 0;
            std::memset(out, 0, sizeof(float) * QB * A.w);
            for (int start = 0; start < size; start += run) {
              const int rows = std::min(size - start, run);
              x.scores(keys.data() + start, rows);
              for (int o = 0; o < x.vectors * LANES; o += LANES) {
                vec most = get(top + o), total{};
                for (int j = 0; j < rows; j++) most = larger(get(x.s + j * QB + o), most);
                const vec shift = finite(most), factor = exponential(get(top + o) - shift);
                at(top + o) = most;
                for (int d = 0; start && d < A.w; d++) at(out + d * QB + o) *= factor;
                for (int j = 0; j < rows; j++) {
                  vec& y = at(x.s + j * QB + o);
                  y = exponential(y - shift);
                  total += y;
                }
                at(sum + o) = get(sum + o) * factor + total;
              }
              sums_of(x.vrows, rows, A.w, x.s, out, x.vectors);
            }
            for (int i = 0; i < x.count; i++) {
              float* row = (float*)A.out.row(b, h, x.queries[i]);
              const float inverse = sum[i] == 0 ? 0 : 1 / sum[i];
              for (int d = 0; d < A.w; d++) row[d] = out[d * QB + i] * inverse;
              if (!A.norm.data) continue;
              float* norm = (float*)A.norm.row(b, h, x.queries[i]);
              norm[0] = top[i], norm[1] = inverse;
            }
          } catch (const std::exception&) {
            good = 0;
          }
  }
  return good;
}

extern "C" int parapos_backward(const Attention* attention, float scale) {
  Attention A = *attention;
  A.scale = scale;
  std::atomic<int> good(1);
  const int parts = parts_of(A), tiles = A.tiles, hp = padded(A.h), wp = padded(A.w);
#pragma omp parallel num_threads(A.threads)
  {
    const NoSubnormals flush;
    const int numbers = numbers_of(A);
    const bool learns = std::any_of(A.dc, A.dc + PARTS, [](const Strided& x) { return x.data; });
    std::optional<Block> room;
    float *dkrows[KEYS], *dvrows[KEYS];
#pragma omp for schedule(dynamic) collapse(2)
    for (int b = 0; b < A.B; b++)
      for (int h = 0; h < A.H; h++) try {
        if (!room) room.emplace(A, (size_t)QB * (KEYS + A.w + A.h + 2 * numbers + 4 + hp + wp) + (size_t)(A.N + 1) * (hp + wp));
        Block& x = *room;
        float *ds = x.rest(), *dout = ds + KEYS * QB, *dq = dout + A.w * QB, *dform = dq + A.h * QB;
        float *meanform = dform + numbers * QB, *top = meanform + numbers * QB, *inverse = top + QB, *delta = inverse + QB;
        float *left = delta + QB, *qrows = left + QB, *orows = qrows + hp * QB;
        float *dk = orows + wp * QB, *dv = dk + (size_t)A.N * hp;  // of one head
        std::memset(dk, 0, sizeof(float) * A.N * (hp + wp));
        for (int work = 0; work < tiles * parts; work++) {
          x.choose(b, h, work / parts, work % parts);
          const auto& keys = x.keys();
          const int size = (int)keys.size(), run = size ? run_of(size) : 0;
          std::memset(dout, 0, sizeof(float) * QB * (A.w + A.h + 2 * numbers + 4 + hp + wp));
          for (int i = 0; i < x.count; i++) {
            const float *row = A.dout.row(b, h, x.queries[i]), *query = A.q.row(b, h, x.queries[i]);
            for (int d = 0; d < A.w; d++) dout[d * QB + i] = orows[i * wp + d] = row[d];
            for (int d = 0; d < A.h; d++) qrows[i * hp + d] = query[d] * A.scale;
            const float *norm = A.norm.row(b, h, x.queries[i]), *out = A.out.row(b, h, x.queries[i]);
            top[i] = norm[0], inverse[i] = norm[1];
            // out.dout, the mean of what softmax passes back; for few keys it is summed below.
            double sum = 0;
            for (int d = 0; d < A.w; d++) sum += (double)out[d] * row[d];
            delta[i] = sum;
          }
          for (int start = 0; start < size; start += run) {
            const int rows = std::min(size - start, run);
            const int32_t* index = keys.data() + start;
            x.scores(index, rows);
            scores_of(x.vrows, rows, A.w, dout, ds, x.vectors);
            for (int o = 0; o < x.vectors * LANES; o += LANES) {
              const vec shift = finite(get(top + o)), factor = get(inverse + o);
              vec mean{};
              for (int j = 0; j < rows; j++) {
                vec& p = at(x.s + j * QB + o);
                p = exponential(p - shift) * factor;
                mean += p * get(ds + j * QB + o);
              }
              if (size > KEYS) mean = get(delta + o);  // else all weights are here, which rounds less
              vec total{};
              for (int j = 0; j < rows; j++) {
                vec& y = at(ds + j * QB + o);
                y = get(x.s + j * QB + o) * (y - mean);
                total += y;
              }
              at(left + o) += total;
            }
            for (int j = 0; j < rows; j++) dkrows[j] = dk + (size_t)index[j] * hp, dvrows[j] = dv + (size_t)index[j] * wp;
            gather_back(x.s, rows, x.count, orows, dvrows, wp);
            gather_back(ds, rows, x.count, qrows, dkrows, hp);
            sums_of(x.krows, rows, A.h, ds, dq, x.vectors);
            if (learns)
              x.with_positions([&](auto dims, auto distance, int o) {
                x.sum_form<dims(), distance()>(o, ds, dform);
                if (size > KEYS) x.sum_form<dims(), distance()>(o, x.s, meanform);
              });
          }
          for (int i = 0; i < x.count; i++) {
            float* row = (float*)A.dq.row(b, h, x.queries[i]);
            for (int d = 0; d < A.h; d++) row[d] = dq[d * QB + i] * A.scale;
            if (!learns) continue;
            const bool placed = A.at.row(b, 0, x.queries[i])[0] == A.at.row(b, 0, x.queries[i])[0];
            // ds of a query sum to 0 but for how the mean was rounded, which functions of a D far away would magnify.
            for (int f = 0; f < numbers; f++) dform[f * QB + i] -= left[i] * meanform[f * QB + i];
            for (int part = 0, row = 0; part < PARTS; part++)
              for (int c = 0; c < A.f[part]; c++, row++) {
                if (!A.dc[part].data) continue;
                float sum = 0;
                for (int f = 0; f < numbers; f++)
                  if (const float factor = A.matrix.row(0, 0, row)[f]) sum += dform[f * QB + i] * factor;
                ((float*)A.dc[part].row(b, h, x.queries[i]))[c] = placed ? sum : 0;
              }
          }
        }
        for (int j = 0; j < A.N; j++) {
          std::memcpy((void*)A.dk.row(b, h, j), dk + (size_t)j * hp, sizeof(float) * A.h);
          std::memcpy((void*)A.dv.row(b, h, j), dv + (size_t)j * wp, sizeof(float) * A.w);
        }
      } catch (const std::exception&) {
        good = 0;
      }
  }
  return good;
}
