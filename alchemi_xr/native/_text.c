/* Tables of numbers in text: where frames lie, what their comments hold, and the
 * numbers themselves, many frames in one call, without the GIL.
 *
 * Only what is plainly right is taken here. At anything else each function stops
 * and says where; the Python side then looks at that place in its own, slower way,
 * which has the last word and the error messages. So there is one grammar, in
 * Python, and a part of it here. Every range is checked against the length of the
 * text before it is read.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { MAX_PAIRS = 48, MAX_SHAPES = 64, MAX_SCALARS = 64 };

/* Blanks are those of bytes.split(): 9 to 13 and 32. */
static inline int is_blank(unsigned char c) { return c == 32 || (unsigned char)(c - 9) < 5; }
static inline int is_digit(unsigned char c) { return (unsigned char)(c - '0') < 10; }

/* -- one number ------------------------------------------------------------------ */

/* 5^q for q from LOWEST to HIGHEST, the leading 128 bits: high word, low word. */
enum { LOWEST = -342, HIGHEST = 308 };
static uint64_t powers[2 * (HIGHEST - LOWEST + 1)];
static int have_powers = 0;
static const double exact[23] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                 1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

static inline void multiply(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    *high = (uint64_t)(product >> 64);
    *low = (uint64_t)product;
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t low_part = a0 * b0, middle = a1 * b0 + (low_part >> 32);
    uint64_t other = a0 * b1 + (uint32_t)middle;
    *high = a1 * b1 + (middle >> 32) + (other >> 32);
    *low = (other << 32) | (uint32_t)low_part;
#endif
}

static inline int leading_zeros(uint64_t w) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_clzll(w);
#else
    int n = 0;
    while (!(w >> 63)) {
        w <<= 1;
        n++;
    }
    return n;
#endif
}

/* w * 10^q, w != 0, rounded to nearest, ties to even; 0 where this way cannot tell.
 * D. Lemire, "Number parsing at a gigabyte per second", Softw. Pract. Exp. 51 (2021). */
static int scaled(uint64_t w, int64_t q, double *out) {
    if (w <= (UINT64_C(1) << 53) && q >= -22 && q <= 22) {
        *out = q < 0 ? (double)w / exact[-q] : (double)w * exact[q];
        return 1; /* both exact, one rounding */
    }
    if (q < LOWEST || q > HIGHEST || !have_powers)
        return 0;
    int shift = leading_zeros(w);
    w <<= shift;
    const uint64_t *power = powers + 2 * (q - LOWEST);
    uint64_t high, low;
    multiply(w, power[0], &high, &low);
    if ((high & 0x1FF) == 0x1FF) {
        uint64_t more, rest;
        multiply(w, power[1], &more, &rest);
        low += more;
        high += low < more;
    }
    if (low == UINT64_MAX && (q < -27 || q > 55))
        return 0;
    int top = (int)(high >> 63);
    uint64_t mantissa = high >> (top + 9);
    int64_t exponent = (((152170 + 65536) * q) >> 16) + 63 + top - shift + 1023;
    if (exponent <= 0)
        return 0; /* subnormal or zero */
    if (low <= 1 && q >= -4 && q <= 23 && (mantissa & 3) == 1 && (mantissa << (top + 9)) == high)
        mantissa &= ~UINT64_C(1); /* exactly between two: to the even one */
    mantissa += mantissa & 1;
    mantissa >>= 1;
    if (mantissa >= (UINT64_C(2) << 52)) {
        mantissa = UINT64_C(1) << 52;
        exponent++;
    }
    if (exponent >= 0x7FF)
        return 0;
    uint64_t bits = (mantissa & ~(UINT64_C(1) << 52)) | (uint64_t)exponent << 52;
    memcpy(out, &bits, 8);
    return 1;
}

/* The value of eight digits, or -1. */
static inline int64_t eight_digits(const char *p) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t v;
    memcpy(&v, p, 8);
    if (((v & UINT64_C(0xF0F0F0F0F0F0F0F0)) |
         (((v + UINT64_C(0x0606060606060606)) & UINT64_C(0xF0F0F0F0F0F0F0F0)) >> 4)) !=
        UINT64_C(0x3333333333333333))
        return -1;
    v -= UINT64_C(0x3030303030303030);
    v = v * 10 + (v >> 8); /* pairs, in every other byte */
    v = ((v & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x000F424000000064) +
         ((v >> 16) & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x0000271000000001)) >>
        32;
    return (int64_t)(uint32_t)v;
#else
    int64_t value = 0;
    for (int i = 0; i < 8; i++) {
        if (!is_digit(p[i]))
            return -1;
        value = value * 10 + (p[i] - '0');
    }
    return value;
#endif
}

/* [-+]? (digits [. digits*] | . digits) ([eEdD] [-+]? digits)? from p on; where it ends, or NULL.
 * What stands behind it is for the caller to look at. `json`: only what JSON calls a number,
 * and not -0, which is whole there and so has no sign. */
static inline const char *read_number(const char *p, const char *end, double *out, int json) {
    int negative = 0;
    if (p < end && (*p == '-' || (*p == '+' && !json)))
        negative = *p++ == '-';
    const char *first = p;
    if (json && (end - p < 2 || !is_digit(*p) || (*p == '0' && is_digit(p[1]))))
        return NULL;
    uint64_t w = 0;
    int64_t scale = 0;
    /* Nineteen digits fit into w; `kept` counts those from the first that is not 0. */
    int kept = 0, cut = 0;
    const char *begin = p;
    for (; p < end && is_digit(*p); p++) {
        if (kept < 19) {
            w = w * 10 + (uint64_t)(*p - '0');
            kept += w != 0;
        } else {
            scale++;
            cut |= *p != '0';
        }
    }
    Py_ssize_t digits = p - begin;
    if (json && negative && p - first == 1 && *first == '0' &&
        (p == end || (*p != '.' && *p != 'e' && *p != 'E')))
        return NULL;
    if (p < end && *p == '.') {
        begin = ++p;
        if (json && (p == end || !is_digit(*p)))
            return NULL;
        int64_t eight;
        while (kept <= 11 && end - p >= 8 && (eight = eight_digits(p)) >= 0) {
            if (w != 0)
                kept += 8;
            else if (eight != 0) /* its number of digits, or one more: log10(2) is 1233/4096 */
                kept = ((64 - leading_zeros((uint64_t)eight)) * 1233 >> 12) + 1;
            w = w * 100000000 + (uint64_t)eight;
            scale -= 8;
            p += 8;
        }
        for (; p < end && is_digit(*p); p++) {
            if (kept < 19) {
                w = w * 10 + (uint64_t)(*p - '0');
                kept += w != 0;
                scale--;
            } else {
                cut |= *p != '0';
            }
        }
        digits += p - begin;
    }
    if (digits == 0)
        return NULL;
    if (p < end && (*p == 'e' || *p == 'E' || (!json && (*p == 'd' || *p == 'D')))) {
        p++;
        int less = 0;
        if (p < end && (*p == '-' || *p == '+'))
            less = *p++ == '-';
        begin = p;
        int64_t e = 0;
        for (; p < end && is_digit(*p) && p - begin < 6; p++)
            e = e * 10 + (*p - '0');
        if (p == begin || p - begin > 5)
            return NULL;
        scale += less ? -e : e;
    }
    double value = 0.0;
    if (w != 0) {
        if (!scaled(w, scale, &value))
            return NULL;
        if (cut) {
            double above;
            if (!scaled(w + 1, scale, &above) || above != value)
                return NULL;
        }
    }
    *out = negative ? -value : value;
    return p;
}

static const char *read_real(const char *p, const char *end, double *out) {
    return read_number(p, end, out, 0);
}

/* [-+]? digits, at most 18 of them. */
static int read_whole(const char *p, const char *end, int64_t *out) {
    int negative = 0;
    if (p < end && (*p == '-' || *p == '+'))
        negative = *p++ == '-';
    if (p == end || end - p > 18)
        return 0;
    int64_t value = 0;
    for (; p < end; p++) {
        if (!is_digit(*p))
            return 0;
        value = value * 10 + (*p - '0');
    }
    *out = negative ? -value : value;
    return 1;
}

static int read_logical(const char *p, const char *end, char *out) {
    switch (end - p) {
    case 1:
        *out = *p == 'T' || *p == '1';
        return *out || *p == 'F' || *p == '0';
    case 4:
        *out = 1;
        return memcmp(p, "True", 4) == 0 || memcmp(p, "true", 4) == 0;
    case 5:
        *out = 0;
        return memcmp(p, "False", 5) == 0 || memcmp(p, "false", 5) == 0;
    }
    return 0;
}

/* -- atom lines -------------------------------------------------------------------- */

/* Where the values of one word of each line go. */
typedef struct {
    char *at;
    int64_t step;
    char kind; /* E element, R real, I whole number, L logical, S passed over */
} word_t;

/* Past blanks that end no line; columns are padded with them. */
static inline const char *skip_blanks(const char *p, const char *end) {
    static const char spaces[9] = "        ";
    while (end - p >= 8 && memcmp(p, spaces, 8) == 0)
        p += 8;
    while (p < end && is_blank(*p) && *p != '\n')
        p++;
    return p;
}

/* The lines of [p, end): `rows` of them, from row `row` of the targets on. */
static int read_lines(const char *p, const char *end, int64_t rows, int64_t row,
                      const word_t *words, int count, int loose, const int64_t *symbols) {
    for (; rows > 0; rows--, row++) {
        for (int i = 0; i < count; i++) {
            p = skip_blanks(p, end);
            char *to = words[i].at + row * words[i].step;
            if (words[i].kind == 'R') {
                double value;
                p = read_real(p, end, &value);
                if (p == NULL || (p < end && !is_blank(*p)))
                    return 0;
                memcpy(to, &value, 8);
                continue;
            }
            const char *begin = p;
            while (p < end && !is_blank(*p))
                p++;
            if (p == begin)
                return 0;
            switch (words[i].kind) {
            case 'E': {
                if (p - begin > 2)
                    return 0;
                int second = p - begin == 2 ? (unsigned char)begin[1] : 32;
                int64_t number = symbols[(unsigned char)begin[0] | second << 8];
                if (number < 0)
                    return 0;
                memcpy(to, &number, 8);
                break;
            }
            case 'I': {
                int64_t value;
                if (!read_whole(begin, p, &value))
                    return 0;
                memcpy(to, &value, 8);
                break;
            }
            case 'L':
                if (!read_logical(begin, p, to))
                    return 0;
                break;
            }
        }
        while (p < end && *p != '\n') {
            if (!loose && !is_blank(*p))
                return 0;
            p++;
        }
        if (p == end)
            return rows == 1; /* the last line of a file may lack its newline */
        p++;
    }
    return p == end;
}

/* table(text, ranges, n, words, count, loose, symbols) -> frames read before the first odd one.
 * ranges: int64 [n, 4]: start, stop, lines, first row. */
static PyObject *text_table(PyObject *self, PyObject *args) {
    Py_buffer text;
    unsigned long long ranges_at, words_at, symbols_at;
    Py_ssize_t n;
    int count, loose;
    if (!PyArg_ParseTuple(args, "y*KnKipK:table", &text, &ranges_at, &n, &words_at, &count, &loose,
                          &symbols_at))
        return NULL;
    const char *data = text.buf;
    const int64_t *ranges = (const int64_t *)(uintptr_t)ranges_at;
    Py_ssize_t i = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (; i < n; i++) {
        const int64_t *r = ranges + 4 * i;
        if (r[0] < 0 || r[1] < r[0] || r[1] > text.len)
            break;
        if (!read_lines(data + r[0], data + r[1], r[2], r[3],
                        (const word_t *)(uintptr_t)words_at, count, loose,
                        (const int64_t *)(uintptr_t)symbols_at))
            break;
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&text);
    return PyLong_FromSsize_t(i);
}

/* -- frames ------------------------------------------------------------------------- */

/* frames(text, start, at_end, out, room) -> (frames found, bytes passed, lines passed).
 * out: int64 [room, 7]: offset, line, comment start and stop, atoms start, stop, atoms. */
static PyObject *text_frames(PyObject *self, PyObject *args) {
    Py_buffer text;
    unsigned long long out_at;
    Py_ssize_t start, room;
    int at_end;
    if (!PyArg_ParseTuple(args, "y*npKn:frames", &text, &start, &at_end, &out_at, &room))
        return NULL;
    int64_t *out = (int64_t *)(uintptr_t)out_at;
    Py_ssize_t found = 0;
    int64_t line = 0;
    const char *data = text.buf, *end = data + text.len;
    const char *p = data + (start < 0 || start > text.len ? text.len : start);
    Py_BEGIN_ALLOW_THREADS;
    while (found < room) {
        /* Lines of blanks stand between frames. */
        const char *q = p;
        for (; q < end && is_blank(*q); q++) {
            if (*q == '\n') {
                line++;
                p = q + 1;
            }
        }
        if (q == end)
            break;
        int64_t atoms = 0;
        int digits = 0;
        for (; q < end && is_digit(*q) && digits < 10; q++, digits++)
            atoms = atoms * 10 + (*q - '0');
        while (q < end && is_blank(*q) && *q != '\n')
            q++;
        if (digits == 0 || digits > 9 || q == end || *q != '\n')
            break;
        const char *comment = ++q;
        const char *stop = q < end ? memchr(q, '\n', (size_t)(end - q)) : NULL;
        if (stop == NULL && (!at_end || atoms > 0 || q == end))
            break;
        if (stop == NULL)
            stop = end;
        const char *body = stop < end ? stop + 1 : end;
        q = body;
        int64_t left = atoms;
        for (; left > 0 && q < end; left--) {
            const char *next = memchr(q, '\n', (size_t)(end - q));
            if (next == NULL) {
                if (!at_end)
                    break;
                next = end - 1;
            }
            q = next + 1;
        }
        /* Lines shorter than "H 0 0 0" hold no atoms: a count that lies. */
        if (left > 0 || q - body < 7 * atoms)
            break;
        /* What follows is nothing, or the next count: else a count lies. */
        const char *after = q;
        while (after < end && is_blank(*after) && *after != '\n')
            after++;
        while (after < end && is_digit(*after))
            after++;
        while (after < end && is_blank(*after) && *after != '\n')
            after++;
        if (after == end ? !at_end : *after != '\n')
            break;
        while (comment < stop && is_blank(*comment))
            comment++;
        const char *last = stop;
        while (last > comment && is_blank(last[-1]))
            last--;
        int64_t *o = out + 7 * found++;
        o[0] = p - data;
        o[1] = line;
        o[2] = comment - data;
        o[3] = last - data;
        o[4] = body - data;
        o[5] = q - data;
        o[6] = atoms;
        p = q;
        line += 2 + atoms;
    }
    Py_END_ALLOW_THREADS;
    Py_ssize_t passed = p - data;
    PyBuffer_Release(&text);
    return Py_BuildValue("nnL", found, passed, (long long)line);
}

/* -- comments ------------------------------------------------------------------------ */

typedef struct {
    int32_t key, key_stop, value, stop;
    int32_t words;
    char kind; /* I whole numbers, R numbers, T other text */
} pair_t;

/* What a value is made of; words are parted by blanks and commas. */
static void classify(const char *p, const char *end, pair_t *out) {
    int words = 0, reals = 0;
    out->kind = 'T';
    out->words = 0;
    while (p < end) {
        while (p < end && (is_blank(*p) || *p == ','))
            p++;
        if (p == end)
            break;
        const char *begin = p;
        if (*p == '-' || *p == '+')
            p++;
        const char *first = p;
        while (p < end && is_digit(*p))
            p++;
        Py_ssize_t before = p - first, behind = 0;
        int real = 0;
        if (p < end && *p == '.') {
            real = 1;
            for (p++, first = p; p < end && is_digit(*p); p++)
                behind++;
        }
        if (before + behind == 0)
            return;
        if (p < end && (*p == 'e' || *p == 'E' || *p == 'd' || *p == 'D')) {
            real = 1;
            p++;
            if (p < end && (*p == '-' || *p == '+'))
                p++;
            first = p;
            while (p < end && is_digit(*p))
                p++;
            if (p == first)
                return;
        }
        if (p < end && !is_blank(*p) && *p != ',')
            return;
        if (!real && p - begin > 18)
            return;
        reals |= real;
        words++;
    }
    if (words == 0)
        return;
    out->kind = reals ? 'R' : 'I';
    out->words = words;
}

/* The pairs of one comment; -1 where something stands that needs a second look. */
static int split(const char *text, const char *end, pair_t *out) {
    int count = 0;
    int equals = 0;
    for (const char *p = text; p < end; p++) {
        unsigned char c = (unsigned char)*p;
        if (c >= 127 || (c < 32 && !is_blank(c)) || c == '\\' || c == '\'' || c == '{' ||
            c == '}' || c == '[' || c == ']')
            return -1;
        equals |= c == '=';
    }
    if (!equals) {
        /* A title, or nothing. */
        if (text == end)
            return 0;
        out->key = out->key_stop = 0;
        out->value = 0;
        out->stop = (int32_t)(end - text);
        out->kind = 'T';
        out->words = 0;
        return 1;
    }
    const char *p = text;
    while (p < end) {
        while (p < end && is_blank(*p))
            p++;
        if (p == end)
            break;
        if (count == MAX_PAIRS)
            return -1;
        pair_t *o = out + count++;
        const char *begin = p;
        while (p < end && !is_blank(*p) && *p != '=' && *p != '"')
            p++;
        o->key = (int32_t)(begin - text);
        o->key_stop = (int32_t)(p - text);
        if (p == begin)
            return -1;
        while (p < end && is_blank(*p))
            p++;
        if (p == end || *p != '=')
            return -1;
        p++;
        while (p < end && is_blank(*p))
            p++;
        if (p == end)
            return -1;
        if (*p == '"') {
            begin = ++p;
            while (p < end && *p != '"')
                p++;
            if (p == end)
                return -1;
            o->stop = (int32_t)(p - text);
            p++;
            if (p < end && !is_blank(*p))
                return -1;
        } else {
            begin = p;
            while (p < end && !is_blank(*p)) {
                if (*p == '"')
                    return -1;
                p++;
            }
            o->stop = (int32_t)(p - text);
        }
        o->value = (int32_t)(begin - text);
        classify(begin, text + o->stop, o);
    }
    return count;
}

static int is_properties(const char *text, const pair_t *p) {
    return p->key_stop - p->key == 10 && (text[p->key] == 'P' || text[p->key] == 'p') &&
           memcmp(text + p->key + 1, "roperties", 9) == 0;
}

static int same_words(const char *a, int32_t a0, int32_t a1, const char *b, int32_t b0,
                      int32_t b1) {
    return a1 - a0 == b1 - b0 && memcmp(a + a0, b + b0, (size_t)(a1 - a0)) == 0;
}

/* Same keys in the same order, values of the same make, and the same columns. */
static int same_shape(const char *a, const pair_t *x, const char *b, const pair_t *y, int count) {
    for (int i = 0; i < count; i++) {
        if (x[i].kind != y[i].kind || x[i].words != y[i].words ||
            !same_words(a, x[i].key, x[i].key_stop, b, y[i].key, y[i].key_stop))
            return 0;
        if (is_properties(a, x + i) &&
            !same_words(a, x[i].value, x[i].stop, b, y[i].value, y[i].stop))
            return 0;
    }
    return 1;
}

/* pairs(text, ranges, step, n, shapes, spans) -> list of (frame, pairs) of each shape, where
 * pairs are (key start, key stop, value start, value stop, kind, words), from the comment on.
 * ranges: int64, (start, stop) every `step` values; shapes: int32 [n], -1 for those to look at
 * again; spans: int64 [n, MAX_PAIRS, 2], in the text. */
static PyObject *text_pairs(PyObject *self, PyObject *args) {
    Py_buffer text;
    unsigned long long frames_at, shapes_at, spans_at;
    Py_ssize_t n, step;
    if (!PyArg_ParseTuple(args, "y*KnnKK:pairs", &text, &frames_at, &step, &n, &shapes_at,
                          &spans_at))
        return NULL;
    const int64_t *frames = (const int64_t *)(uintptr_t)frames_at;
    int32_t *shapes = (int32_t *)(uintptr_t)shapes_at;
    int64_t *spans = (int64_t *)(uintptr_t)spans_at;
    const char *data = text.buf;
    pair_t *known = PyMem_Malloc(sizeof(pair_t) * MAX_PAIRS * MAX_SHAPES);
    if (known == NULL) {
        PyBuffer_Release(&text);
        return PyErr_NoMemory();
    }
    int64_t first[MAX_SHAPES];
    int counts[MAX_SHAPES], made = 0, last = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t start = frames[i * step], stop = frames[i * step + 1];
        shapes[i] = -1;
        if (start < 0 || stop < start || stop > text.len || stop - start > INT32_MAX)
            continue;
        pair_t pairs[MAX_PAIRS];
        int count = split(data + start, data + stop, pairs);
        if (count < 0)
            continue;
        int shape = -1;
        for (int k = 0; k < made; k++) {
            int j = (last + k) % made;
            if (counts[j] == count && same_shape(data + frames[first[j] * step], known + j * MAX_PAIRS,
                                                 data + start, pairs, count)) {
                shape = j;
                break;
            }
        }
        if (shape < 0) {
            if (made == MAX_SHAPES)
                continue;
            shape = made++;
            first[shape] = i;
            counts[shape] = count;
            memcpy(known + shape * MAX_PAIRS, pairs, sizeof(pair_t) * (size_t)count);
        }
        last = shape;
        shapes[i] = shape;
        for (int k = 0; k < count; k++) {
            spans[2 * (i * MAX_PAIRS + k)] = start + pairs[k].value;
            spans[2 * (i * MAX_PAIRS + k) + 1] = start + pairs[k].stop;
        }
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&text);
    PyObject *out = PyList_New(0);
    for (int j = 0; out != NULL && j < made; j++) {
        PyObject *rows = PyList_New(0);
        for (int k = 0; rows != NULL && k < counts[j]; k++) {
            const pair_t *p = known + j * MAX_PAIRS + k;
            PyObject *row = Py_BuildValue("iiiiCi", p->key, p->key_stop, p->value, p->stop,
                                          (int)p->kind, p->words);
            if (row == NULL || PyList_Append(rows, row) < 0)
                Py_CLEAR(rows);
            Py_XDECREF(row);
        }
        PyObject *item = rows == NULL ? NULL : Py_BuildValue("LN", (long long)first[j], rows);
        if (item == NULL || PyList_Append(out, item) < 0)
            Py_CLEAR(out);
        Py_XDECREF(item);
    }
    PyMem_Free(known);
    return out;
}

/* numbers(text, spans, step, n, words, whole, out) -> texts read before the first odd one.
 * spans: int64, (start, stop) every `step` values; out: float64 or int64 [n, words]. */
static PyObject *text_numbers(PyObject *self, PyObject *args) {
    Py_buffer text;
    unsigned long long spans_at, out_at;
    Py_ssize_t n, step, words;
    int whole;
    if (!PyArg_ParseTuple(args, "y*KnnnpK:numbers", &text, &spans_at, &step, &n, &words, &whole,
                          &out_at))
        return NULL;
    const int64_t *spans = (const int64_t *)(uintptr_t)spans_at;
    char *out = (char *)(uintptr_t)out_at;
    const char *data = text.buf;
    Py_ssize_t i = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (; i < n; i++) {
        int64_t start = spans[i * step], stop = spans[i * step + 1];
        if (start < 0 || stop < start || stop > text.len)
            break;
        const char *p = data + start, *end = data + stop;
        Py_ssize_t k = 0;
        for (;; k++) {
            while (p < end && (is_blank(*p) || *p == ','))
                p++;
            if (p == end || k == words)
                break;
            const char *begin = p;
            while (p < end && !is_blank(*p) && *p != ',')
                p++;
            char *to = out + 8 * (i * words + k);
            if (whole) {
                int64_t value;
                if (!read_whole(begin, p, &value))
                    break;
                memcpy(to, &value, 8);
            } else {
                double value;
                if (read_real(begin, p, &value) != p)
                    break;
                memcpy(to, &value, 8);
            }
        }
        if (k != words || p != end)
            break;
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&text);
    return PyLong_FromSsize_t(i);
}

/* -- arrays in JSON ------------------------------------------------------------------ */

static inline const char *skip_white(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r'))
        p++;
    return p;
}

/* Past a mark, with blanks before it; NULL where it does not stand there. */
static inline const char *past(const char *p, const char *end, const char *mark, size_t size) {
    if (p == NULL)
        return NULL;
    p = skip_white(p, end);
    if ((size_t)(end - p) < size || memcmp(p, mark, size) != 0)
        return NULL;
    return p + size;
}

enum { REALS, SINGLES, WHOLES, HALVES, LOGICALS };
static const struct {
    const char *name;
    int size;
} types[] = {{"\"float64\"", 8}, {"\"float32\"", 4}, {"\"int64\"", 8}, {"\"int32\"", 4},
             {"\"bool\"", 1}};

/* `count` numbers from p on, parted by commas, up to and past the closing bracket. */
static const char *read_list(const char *p, const char *end, int64_t count, int type, char *to) {
    for (int64_t i = 0; i < count; i++) {
        if (i > 0) {
            if (p == end || *p != ',') {
                p = skip_white(p, end);
                if (p == end || *p != ',')
                    return NULL;
            }
            p++;
        }
        if (p < end && *p == ' ')
            p++;
        if (p < end && (unsigned char)*p <= 32)
            p = skip_white(p, end);
        if (type == REALS) {
            double value;
            p = read_number(p, end, &value, 1);
            if (p == NULL)
                return NULL;
            memcpy(to + 8 * i, &value, 8);
        } else if (type == SINGLES) {
            double value;
            p = read_number(p, end, &value, 1);
            if (p == NULL || value > 3.4e38 || value < -3.4e38)
                return NULL;
            float single = (float)value;
            memcpy(to + 4 * i, &single, 4);
        } else if (type == LOGICALS) {
            if (end - p >= 4 && memcmp(p, "true", 4) == 0) {
                to[i] = 1;
                p += 4;
            } else if (end - p >= 5 && memcmp(p, "false", 5) == 0) {
                to[i] = 0;
                p += 5;
            } else {
                return NULL;
            }
        } else {
            const char *begin = p;
            if (p < end && *p == '-')
                p++;
            const char *first = p;
            while (p < end && is_digit(*p))
                p++;
            int64_t value = 0; /* for compilers that do not see it */
            if (p == first || (*first == '0' && p - first > 1) || !read_whole(begin, p, &value))
                return NULL;
            if (type == WHOLES) {
                memcpy(to + 8 * i, &value, 8);
            } else {
                if (value > INT32_MAX || value < INT32_MIN)
                    return NULL;
                int32_t half = (int32_t)value;
                memcpy(to + 4 * i, &half, 4);
            }
        }
    }
    return past(p, end, "]", 1);
}

/* Decimal digits of a number that is not negative. */
static char *write_whole(char *to, int64_t value) {
    char digits[20];
    int n = 0;
    do {
        digits[n++] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    while (n > 0)
        *to++ = digits[--n];
    return to;
}

/* What is written while a text is read. */
typedef struct {
    char *cells;
    int64_t room, used; /* bytes of the cells */
    int64_t first;      /* where the first array lies */
    int64_t rows;       /* of the first array; -1 before it */
    char *rest, *form, *words;
    int forming; /* whether the form can be told */
} taken_t;

/* One array, from behind the key on; what is written of it: "[[shape], type, offset]}". */
static const char *read_array(const char *p, const char *end, taken_t *t) {
    p = past(p, end, ":", 1);
    p = past(p, end, "[", 1);
    p = past(p, end, "[", 1);
    if (p == NULL)
        return NULL;
    int64_t count = 1;
    char *out = t->rest, *form = t->form + 2;
    t->form[0] = '@';
    *out++ = '[';
    *out++ = '[';
    p = skip_white(p, end);
    for (int axis = 0; p < end && *p != ']'; axis++) {
        if (axis > 0) {
            p = past(p, end, ",", 1);
            if (p == NULL)
                return NULL;
            *out++ = ',';
            p = skip_white(p, end);
        }
        const char *begin = p;
        while (p < end && is_digit(*p))
            p++;
        int64_t length;
        if (axis == 8 || p == begin || p - begin > 10 || (*begin == '0' && p - begin > 1) ||
            !read_whole(begin, p, &length))
            return NULL;
        /* Each number takes a place in the text. */
        if (length > end - p || (length > 0 && count > (end - p) / length))
            return NULL;
        count *= length;
        out = write_whole(out, length);
        if (t->rows < 0)
            t->rows = length;
        if (axis == 0 && length == t->rows)
            *form++ = '*';
        else
            form = write_whole(form, length);
        *form++ = ',';
        p = skip_white(p, end);
    }
    p = past(p, end, "]", 1);
    p = past(p, end, ",", 1);
    if (p == NULL)
        return NULL;
    p = skip_white(p, end);
    int type = -1;
    for (int k = 0; k < 5; k++) {
        size_t size = strlen(types[k].name);
        if ((size_t)(end - p) >= size && memcmp(p, types[k].name, size) == 0) {
            type = k;
            p += size;
            *out++ = ']';
            *out++ = ',';
            memcpy(out, types[k].name, size);
            out += size;
            *out++ = ',';
            break;
        }
    }
    if (type < 0)
        return NULL;
    p = past(p, end, ",", 1);
    p = past(p, end, "[", 1);
    int64_t at = (t->used + 7) & ~INT64_C(7);
    if (p == NULL || at > t->room || count * types[type].size > t->room - at)
        return NULL;
    p = read_list(p, end, count, type, t->cells + at);
    p = past(p, end, "]", 1);
    p = past(p, end, "}", 1);
    if (p == NULL)
        return NULL;
    t->used = at + count * types[type].size;
    if (t->first < 0)
        t->first = at;
    out = write_whole(out, at);
    *out++ = ']';
    *out++ = '}';
    t->rest = out;
    t->form[1] = (char)('0' + type);
    if (type == REALS && count == 9) {
        /* A cell of zeros is none. */
        int zero = 1;
        for (int k = 0; k < 9; k++) {
            double value;
            memcpy(&value, t->cells + at + 8 * k, 8);
            zero &= value == 0.0;
        }
        if (zero)
            *form++ = 'z';
    }
    t->form = form;
    return p;
}

/* A number that stands by itself; the end of it. Its value goes to `scalars`. */
static const char *read_scalar(const char *p, const char *end, taken_t *t, char *scalars,
                               int *count) {
    const char *begin = p;
    if (*p == '-')
        p++;
    const char *first = p;
    while (p < end && is_digit(*p))
        p++;
    Py_ssize_t digits = p - first;
    int whole = 1;
    for (; p < end && (is_digit(*p) || *p == '.' || *p == 'e' || *p == 'E' || *p == '-' || *p == '+');
         p++)
        whole = 0;
    memcpy(t->rest, begin, (size_t)(p - begin));
    t->rest += p - begin;
    if (*count == MAX_SCALARS || digits == 0 || (*first == '0' && digits > 1)) {
        t->forming = 0;
        return p;
    }
    if (whole) {
        int64_t value = 0;
        t->forming &= read_whole(begin, p, &value);
        memcpy(scalars + 8 * (*count)++, &value, 8);
    } else {
        double value = 0;
        t->forming &= read_number(begin, p, &value, 1) == p;
        memcpy(scalars + 8 * (*count)++, &value, 8);
    }
    *t->form++ = whole ? 'i' : 'f';
    return p;
}

/* A text that is no key, quotes included: to the rest and to the words. */
static void keep_word(const char *begin, const char *end, taken_t *t) {
    memcpy(t->rest, begin, (size_t)(end - begin));
    t->rest += end - begin;
    for (const char *p = begin + 1; p < end - 1; p++) {
        unsigned char c = (unsigned char)*p;
        t->forming &= c >= 32 && c < 127 && c != '\\';
    }
    memcpy(t->words, begin + 1, (size_t)(end - begin - 2));
    t->words += end - begin - 2;
    *t->words++ = 0;
    *t->form++ = 's';
}

static const struct {
    const char *name;
    int size;
    char mark;
} literals[] = {{"true", 4, 'T'}, {"false", 5, 'F'}, {"null", 4, 'N'}};

/* arrays(text, cells, room, used, rest) -> None where something needs a second look, or
 * (bytes of the rest, cells used, form, words, rows, first, scalars).
 * In the rest an array {"__ndarray__": [[shape], "type", [numbers]]} is {"__ndarray__":
 * [[shape],"type",offset]}, and its numbers lie in the cells from that byte on.
 * The form is what texts have in common that differ in numbers, words, and rows alone: None
 * where there are words with escapes or letters beyond ASCII. The words are those that are
 * no keys, each with a 0 behind it; rows is the first length of the first array, which lies
 * at `first`, the others behind it, each at the next multiple of 8; the numbers that stand
 * by themselves are the last `scalars` eights of the cells.
 * cells: `room` bytes, of which `used` are taken; rest: four times the bytes of the text,
 * and 256: an offset may be longer than the numbers, and form and words lie behind. */
static PyObject *text_arrays(PyObject *self, PyObject *args) {
    Py_buffer text;
    unsigned long long cells_at, rest_at;
    Py_ssize_t room, taken;
    if (!PyArg_ParseTuple(args, "y*KnnK:arrays", &text, &cells_at, &room, &taken, &rest_at))
        return NULL;
    static const char name[] = "\"__ndarray__\"";
    const size_t size = sizeof(name) - 1;
    char *rest = (char *)(uintptr_t)rest_at;
    char *form = rest + 2 * text.len + 64, *words = form + text.len + 64;
    taken_t t = {(char *)(uintptr_t)cells_at, room, taken, -1, -1, rest, form, words, 1};
    char scalars[8 * MAX_SCALARS];
    int count = 0;
    const char *p = text.buf, *end = p + text.len;
    Py_BEGIN_ALLOW_THREADS;
    while (p != NULL && p < end) {
        if (*p == '"') {
            const char *begin = p++;
            int escaped = 0;
            while (p < end && *p != '"') {
                if (*p == '\\') {
                    escaped = 1;
                    p++;
                }
                p++;
            }
            if (p >= end) {
                p = NULL;
                break;
            }
            p++;
            const char *next = skip_white(p, end);
            if (next == end || *next != ':') {
                keep_word(begin, p, &t);
                continue;
            }
            /* A key may spell the name of an array otherwise, or stand behind others. */
            if (escaped || ((size_t)(p - begin) == size && memcmp(begin, name, size) == 0)) {
                p = NULL;
                break;
            }
            memcpy(t.rest, begin, (size_t)(p - begin));
            memcpy(t.form, begin, (size_t)(p - begin));
            t.rest += p - begin;
            t.form += p - begin;
        } else if (*p == '{') {
            *t.rest++ = *p++;
            const char *key = past(p, end, name, size);
            if (key == NULL) {
                *t.form++ = '{';
                continue;
            }
            memcpy(t.rest, name, size);
            t.rest += size;
            *t.rest++ = ':';
            p = read_array(key, end, &t);
        } else if (is_digit(*p) || *p == '-') {
            p = read_scalar(p, end, &t, scalars, &count);
        } else if (*p == ',' || *p == ':' || *p == '[' || *p == ']' || *p == '}') {
            *t.rest++ = *t.form++ = *p++;
        } else if (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r') {
            *t.rest++ = *p++;
        } else {
            int found = 0;
            for (int k = 0; k < 3 && !found; k++) {
                if (end - p >= literals[k].size &&
                    memcmp(p, literals[k].name, (size_t)literals[k].size) == 0) {
                    memcpy(t.rest, p, (size_t)literals[k].size);
                    t.rest += literals[k].size;
                    p += literals[k].size;
                    *t.form++ = literals[k].mark;
                    found = 1;
                }
            }
            if (!found)
                p = NULL; /* NaN, or no JSON at all */
        }
    }
    if (p != NULL) {
        t.used = (t.used + 7) & ~INT64_C(7);
        if (t.used > room || 8 * count > room - t.used) {
            p = NULL;
        } else {
            memcpy(t.cells + t.used, scalars, (size_t)(8 * count));
            t.used += 8 * count;
        }
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&text);
    if (p == NULL)
        Py_RETURN_NONE;
    if (!t.forming || t.rows < 1)
        return Py_BuildValue("nnOOiii", (Py_ssize_t)(t.rest - rest), (Py_ssize_t)t.used, Py_None,
                             Py_None, 0, 0, 0);
    return Py_BuildValue("nny#y#nni", (Py_ssize_t)(t.rest - rest), (Py_ssize_t)t.used, form, (Py_ssize_t)(t.form - form), words,
                         (Py_ssize_t)(t.words - words), (Py_ssize_t)t.rows, (Py_ssize_t)t.first,
                         count);
}

/* set_powers(bytes): the table of `powers`, which the Python side works out exactly. */
static PyObject *text_set_powers(PyObject *self, PyObject *args) {
    Py_buffer table;
    if (!PyArg_ParseTuple(args, "y*:set_powers", &table))
        return NULL;
    if (table.len != (Py_ssize_t)sizeof(powers)) {
        PyBuffer_Release(&table);
        PyErr_Format(PyExc_ValueError, "the table of powers has %d bytes", (int)sizeof(powers));
        return NULL;
    }
    memcpy(powers, table.buf, sizeof(powers));
    have_powers = 1;
    PyBuffer_Release(&table);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"table", text_table, METH_VARARGS, "Words of lines as columns."},
    {"frames", text_frames, METH_VARARGS, "Where frames lie."},
    {"pairs", text_pairs, METH_VARARGS, "Keys and values of comments, by their shape."},
    {"numbers", text_numbers, METH_VARARGS, "Numbers of short texts."},
    {"arrays", text_arrays, METH_VARARGS, "Arrays in JSON."},
    {"set_powers", text_set_powers, METH_VARARGS, "Powers of five, to 128 bits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_text", "Tables of numbers in text.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__text(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddIntConstant(made, "MAX_PAIRS", MAX_PAIRS) < 0 ||
        PyModule_AddIntConstant(made, "LOWEST", LOWEST) < 0 ||
        PyModule_AddIntConstant(made, "HIGHEST", HIGHEST) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
