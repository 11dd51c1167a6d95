/* Copies of ranges of rows, all fields of a batch in one call, without the GIL;
 * and chunk files mapped one behind the other, as the flat array that they are.
 *
 * The caller has already said everything that needs thought: which rows, in
 * which order, where they go. Loose functions take addresses and byte counts, and
 * their bounds are checked by the Python side (alchemi_xr/native/rows.py). A Plan
 * takes buffers and checks every copy itself: it is made once for a store, and
 * around each of its calls Python should do as little as can be.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__) || defined(__APPLE__)
#define CAN_MAP 1
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif
#endif

/* -- copies -------------------------------------------------------------------- */

/* The buffer as whole, aligned 64-bit numbers. */
static int numbers_of(PyObject *from, Py_buffer *view, int flags) {
    if (PyObject_GetBuffer(from, view, flags) < 0)
        return -1;
    if (view->len % 8 != 0 || (uintptr_t)view->buf % 8 != 0) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "not a buffer of aligned 64-bit numbers");
        return -1;
    }
    return 0;
}

/* Copy n ranges [starts[i], stops[i]) of rows of `width` bytes to rows targets[i] on;
 * -1 before anything is copied when one leaves the rows of either side. */
static int copy_ranges(const Py_buffer *out, const Py_buffer *source, const int64_t *starts,
                       const int64_t *stops, const int64_t *targets, Py_ssize_t n,
                       int64_t width) {
    const int64_t rows = source->len / width, room = out->len / width;
    for (Py_ssize_t i = 0; i < n; i++)
        if (starts[i] < 0 || stops[i] < starts[i] || stops[i] > rows || targets[i] < 0 ||
            targets[i] > room || stops[i] - starts[i] > room - targets[i])
            return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        memcpy((char *)out->buf + targets[i] * width,
               (const char *)source->buf + starts[i] * width,
               (size_t)((stops[i] - starts[i]) * width));
    return 0;
}

/* copy_ranges(out, source, starts, stops, targets, width): False when a range does not fit. */
static PyObject *rows_copy_ranges(PyObject *self, PyObject *args) {
    PyObject *given[5], *found = NULL;
    Py_ssize_t width;
    Py_buffer views[5];
    int held = 0, wrong;
    if (!PyArg_ParseTuple(args, "OOOOOn", &given[0], &given[1], &given[2], &given[3], &given[4],
                          &width))
        return NULL;
    for (; held < 5; held++)
        if (held < 2 ? PyObject_GetBuffer(given[held], &views[held],
                                          held == 0 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0
                     : numbers_of(given[held], &views[held], PyBUF_SIMPLE) < 0)
            goto done;
    if (width < 1 || views[2].len != views[3].len || views[2].len != views[4].len) {
        PyErr_SetString(PyExc_ValueError, "starts, stops and targets differ in length");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    wrong = copy_ranges(&views[0], &views[1], views[2].buf, views[3].buf, views[4].buf,
                        views[2].len / 8, width);
    Py_END_ALLOW_THREADS
    found = PyBool_FromLong(!wrong);
done:
    while (held-- > 0)
        PyBuffer_Release(&views[held]);
    return found;
}

/* One field of a gather, as seven 64-bit numbers in an array of the caller. */
typedef struct {
    uint64_t target; /* address: rows of the chosen samples, one behind the other */
    uint64_t source; /* address: rows of all samples */
    uint64_t ptr;    /* address: int64 pointer of the level; 0 = one row a sample */
    uint64_t shift;  /* address: int64, added to every number of a sample; 0 = none */
    int64_t width;   /* bytes of a row */
    int64_t size;    /* bytes of a number that is shifted: 4 or 8 */
    int64_t slot;    /* bytes of each sample in the target, the rest zero; 0 = no more than it has */
} field_t;

#define FIXED(W)                                                                          \
    case W:                                                                               \
        for (Py_ssize_t k = 0; k < n; k++)                                                \
            memcpy(target + k * W, source + samples[k] * W, W);                           \
        return

/* One row a sample; lengths that occur are known to the compiler. */
static void gather_single(char *target, const char *source, const int64_t *samples,
                          Py_ssize_t n, int64_t width) {
    switch (width) {
        FIXED(1);
        FIXED(2);
        FIXED(3);
        FIXED(4);
        FIXED(8);
        FIXED(12);
        FIXED(16);
        FIXED(24);
        FIXED(36);
        FIXED(72);
    default:
        for (Py_ssize_t k = 0; k < n; k++)
            memcpy(target + k * width, source + samples[k] * width, (size_t)width);
    }
}

static void gather_field(const field_t *field, const int64_t *samples, Py_ssize_t n) {
    char *target = (char *)(uintptr_t)field->target;
    const char *source = (const char *)(uintptr_t)field->source;
    const int64_t *ptr = (const int64_t *)(uintptr_t)field->ptr;
    const int64_t *shift = (const int64_t *)(uintptr_t)field->shift;
    if (ptr == NULL) {
        gather_single(target, source, samples, n, field->width);
        return;
    }
    for (Py_ssize_t k = 0; k < n; k++) {
        int64_t start = ptr[samples[k]], bytes = (ptr[samples[k] + 1] - start) * field->width;
        const char *from = source + start * field->width;
        if (shift == NULL) {
            memcpy(target, from, (size_t)bytes);
        } else if (field->size == 8) {
            const int64_t *in = (const int64_t *)from;
            int64_t *out = (int64_t *)target, add = shift[k];
            for (int64_t i = 0; i < bytes / 8; i++)
                out[i] = in[i] + add;
        } else {
            const int32_t *in = (const int32_t *)from;
            int32_t *out = (int32_t *)target, add = (int32_t)shift[k];
            for (int64_t i = 0; i < bytes / 4; i++)
                out[i] = in[i] + add;
        }
        if (field->slot > bytes)
            memset(target + bytes, 0, (size_t)(field->slot - bytes));
        target += field->slot > bytes ? field->slot : bytes;
    }
}

/* gather(fields, count, samples, n): addresses of field_t[count] and of int64[n]. */
static PyObject *rows_gather(PyObject *self, PyObject *args) {
    unsigned long long fields, samples;
    Py_ssize_t count, n;
    if (!PyArg_ParseTuple(args, "KnKn", &fields, &count, &samples, &n))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t f = 0; f < count; f++)
        gather_field((const field_t *)(uintptr_t)fields + f,
                     (const int64_t *)(uintptr_t)samples, n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -- gathers that are planned once ------------------------------------------------ */

enum { COPY = 0, SHIFT = 1, WIDEN = 2, NARROW = 3 };

/* Samples whose first bytes are asked for ahead of the copy: their rows lie anywhere. */
#define AHEAD 6

/* One field of a plan. */
typedef struct {
    Py_buffer rows;
    Py_ssize_t width;  /* bytes of a row */
    Py_ssize_t wide;   /* bytes of a row in the target: another number after a cast */
    Py_ssize_t size;   /* bytes of a number that is shifted */
    Py_ssize_t level;  /* number of the pointer; -1 = one row a sample */
    int how;
} line_t;

typedef struct {
    PyObject_HEAD
    line_t *lines;
    Py_buffer *ptrs;
    Py_buffer active;
    Py_ssize_t num_lines, num_ptrs; /* as far as buffers are held */
    int64_t samples;                /* that are stored */
    int64_t length;                 /* that are counted: those of `active`, or all */
} plan_t;

static void plan_dealloc(PyObject *self) {
    plan_t *plan = (plan_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < plan->num_lines; i++)
        PyBuffer_Release(&plan->lines[i].rows);
    for (Py_ssize_t i = 0; i < plan->num_ptrs; i++)
        PyBuffer_Release(&plan->ptrs[i]);
    if (plan->active.obj != NULL)
        PyBuffer_Release(&plan->active);
    PyMem_Free(plan->lines);
    PyMem_Free(plan->ptrs);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Plan(fields, pointers, active): fields are (rows, level, width, wide, size, how). */
static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *fields, *pointers, *active;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Plan takes no names");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &fields, &PyList_Type, &pointers, &active))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    plan_t *plan = (plan_t *)allocate(type, 0);
    if (plan == NULL)
        return NULL;
    Py_ssize_t num_lines = PyList_Size(fields), num_ptrs = PyList_Size(pointers);
    plan->lines = PyMem_Calloc((size_t)num_lines + 1, sizeof(line_t));
    plan->ptrs = PyMem_Calloc((size_t)num_ptrs + 1, sizeof(Py_buffer));
    if (plan->lines == NULL || plan->ptrs == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    if (num_ptrs < 1) {
        PyErr_SetString(PyExc_ValueError, "a plan needs a pointer");
        goto failed;
    }
    for (Py_ssize_t i = 0; i < num_ptrs; i++) {
        if (numbers_of(PyList_GetItem(pointers, i), &plan->ptrs[i], PyBUF_SIMPLE) < 0)
            goto failed;
        plan->num_ptrs++;
        if (plan->ptrs[i].len < 8 || plan->ptrs[i].len != plan->ptrs[0].len) {
            PyErr_SetString(PyExc_ValueError, "pointers differ in length");
            goto failed;
        }
    }
    plan->length = plan->samples = plan->ptrs[0].len / 8 - 1;
    if (active != Py_None) {
        if (numbers_of(active, &plan->active, PyBUF_SIMPLE) < 0)
            goto failed;
        plan->length = plan->active.len / 8;
    }
    for (Py_ssize_t i = 0; i < num_lines; i++) {
        line_t *line = &plan->lines[i];
        PyObject *rows;
        if (!PyArg_ParseTuple(PyList_GetItem(fields, i), "Onnnni", &rows, &line->level,
                              &line->width, &line->wide, &line->size, &line->how))
            goto failed;
        int right = line->level >= -1 && line->level < num_ptrs && line->width >= 0;
        if (line->how == COPY)
            right = right && line->wide == line->width;
        else if (line->how == SHIFT)
            right = right && line->level >= 0 && line->wide == line->width &&
                    (line->size == 4 || line->size == 8) && line->width % line->size == 0;
        else if (line->how == WIDEN)
            right = right && line->width % 4 == 0 && line->wide == 2 * line->width;
        else if (line->how == NARROW)
            right = right && line->width % 8 == 0 && line->wide * 2 == line->width;
        else
            right = 0;
        if (!right) {
            PyErr_SetString(PyExc_ValueError, "a field of a plan is not right");
            goto failed;
        }
        if (PyObject_GetBuffer(rows, &line->rows, PyBUF_SIMPLE) < 0)
            goto failed;
        plan->num_lines++;
        Py_ssize_t each = line->how == COPY ? 1 : line->how == SHIFT ? line->size
                                             : line->how == WIDEN  ? 4
                                                                   : 8;
        if ((uintptr_t)line->rows.buf % (size_t)each != 0) {
            PyErr_SetString(PyExc_ValueError, "numbers that are changed have to be aligned");
            goto failed;
        }
    }
    return (PyObject *)plan;
failed:
    Py_DECREF(plan);
    return NULL;
}

/* Scratch of a request of n samples in w lists: the samples as they are stored, then for
 * each pointer those of the lists, one behind the other, each from 0 on. */
static Py_ssize_t scratch_size(const plan_t *plan, Py_ssize_t n, Py_ssize_t w) {
    return n + plan->num_ptrs * (n + w);
}

/* Bounds of lists, from 0 to n, ascending; -1 when they are not. */
static Py_ssize_t lists_of(const Py_buffer *bounds, Py_ssize_t n) {
    const int64_t *at = bounds->buf;
    Py_ssize_t w = bounds->len / 8 - 1;
    if (w < 0 || at[0] != 0 || at[w] != n)
        return -1;
    for (Py_ssize_t i = 0; i < w; i++)
        if (at[i + 1] < at[i])
            return -1;
    return w;
}

/* 0, or 1 when an index is out of range, or 2 when a pointer descends. */
static int measure(const plan_t *plan, const int64_t *wanted, Py_ssize_t n, const int64_t *bounds,
                   Py_ssize_t w, int64_t *scratch) {
    const int64_t *active = plan->active.obj == NULL ? NULL : plan->active.buf;
    for (Py_ssize_t k = 0; k < n; k++) {
        int64_t i = wanted[k];
        if (i < 0)
            i += plan->length;
        if (i < 0 || i >= plan->length)
            return 1;
        if (active != NULL)
            i = active[i];
        if (i < 0 || i >= plan->samples)
            return 1;
        scratch[k] = i;
    }
    for (Py_ssize_t p = 0; p < plan->num_ptrs; p++) {
        const int64_t *ptr = plan->ptrs[p].buf;
        int64_t *out = scratch + n + p * (n + w);
        for (Py_ssize_t list = 0; list < w; list++) {
            int64_t at = 0;
            *out++ = 0;
            for (int64_t k = bounds[list]; k < bounds[list + 1]; k++) {
                int64_t count = ptr[scratch[k] + 1] - ptr[scratch[k]];
                if (count < 0 || at > INT64_MAX - count)
                    return 2;
                *out++ = at += count;
            }
        }
    }
    return 0;
}

/* measure(samples, bounds, scratch): rows of each list as a flat list, those of the first
 * pointer first; None when an index is out of range. */
static PyObject *plan_measure(PyObject *self, PyObject *args) {
    plan_t *plan = (plan_t *)self;
    PyObject *given[3], *found = NULL;
    Py_buffer samples, bounds, scratch;
    if (!PyArg_ParseTuple(args, "OOO", &given[0], &given[1], &given[2]))
        return NULL;
    if (numbers_of(given[0], &samples, PyBUF_SIMPLE) < 0)
        return NULL;
    if (numbers_of(given[1], &bounds, PyBUF_SIMPLE) < 0)
        goto held_one;
    if (numbers_of(given[2], &scratch, PyBUF_WRITABLE) < 0)
        goto held_two;
    Py_ssize_t n = samples.len / 8, w = lists_of(&bounds, n);
    if (w < 0 || scratch.len / 8 != scratch_size(plan, n, w)) {
        PyErr_SetString(PyExc_ValueError, "bounds or scratch do not fit the samples");
        goto held_all;
    }
    int wrong;
    if (n > 256) { /* a few hundred numbers are read sooner than the GIL changes hands */
        Py_BEGIN_ALLOW_THREADS
        wrong = measure(plan, samples.buf, n, bounds.buf, w, scratch.buf);
        Py_END_ALLOW_THREADS
    } else {
        wrong = measure(plan, samples.buf, n, bounds.buf, w, scratch.buf);
    }
    if (wrong == 1) {
        Py_INCREF(Py_None);
        found = Py_None;
        goto held_all;
    }
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a pointer descends");
        goto held_all;
    }
    found = PyList_New(plan->num_ptrs * w);
    if (found == NULL)
        goto held_all;
    const int64_t *out = (const int64_t *)scratch.buf + n, *at = bounds.buf;
    for (Py_ssize_t p = 0; p < plan->num_ptrs; p++)
        for (Py_ssize_t list = 0; list < w; list++) {
            PyObject *rows = PyLong_FromLongLong(out[p * (n + w) + at[list + 1] + list]);
            if (rows == NULL) {
                Py_CLEAR(found);
                goto held_all;
            }
            PyList_SetItem(found, p * w + list, rows);
        }
held_all:
    PyBuffer_Release(&scratch);
held_two:
    PyBuffer_Release(&bounds);
held_one:
    PyBuffer_Release(&samples);
    return found;
}

static void changed(char *to, const char *from, Py_ssize_t bytes, const line_t *line, int64_t add) {
    if (line->how == WIDEN) {
        const float *in = (const float *)from;
        double *out = (double *)to;
        for (Py_ssize_t i = 0; i < bytes / 4; i++)
            out[i] = (double)in[i];
    } else if (line->how == NARROW) {
        const double *in = (const double *)from;
        float *out = (float *)to;
        for (Py_ssize_t i = 0; i < bytes / 8; i++)
            out[i] = (float)in[i];
    } else if (line->size == 8) {
        const uint64_t *in = (const uint64_t *)from;
        uint64_t *out = (uint64_t *)to;
        for (Py_ssize_t i = 0; i < bytes / 8; i++)
            out[i] = in[i] + (uint64_t)add;
    } else {
        const uint32_t *in = (const uint32_t *)from;
        uint32_t *out = (uint32_t *)to;
        for (Py_ssize_t i = 0; i < bytes / 4; i++)
            out[i] = in[i] + (uint32_t)add;
    }
}

/* Rows of one field; -1 when they leave the rows or the target. */
static int fill_line(const plan_t *plan, const line_t *line, const Py_buffer *target,
                     const int64_t *stored, Py_ssize_t n, const int64_t *bounds, Py_ssize_t w,
                     const int64_t *firsts) {
    const char *rows = line->rows.buf;
    char *to = target->buf, *end = to + target->len;
    const int64_t *ptr = line->level < 0 ? NULL : plan->ptrs[line->level].buf;
    const int64_t *atoms = plan->ptrs[0].buf;
    const int64_t width = line->width;
    if (width == 0)
        return 0;
    const int64_t most = line->rows.len / width;
    if (ptr == NULL && line->how == COPY) {
        if (n * width > target->len || plan->samples > most)
            return -1;
        gather_single(to, rows, stored, n, width);
        return 0;
    }
    for (Py_ssize_t list = 0; list < w; list++) {
        for (int64_t k = bounds[list]; k < bounds[list + 1]; k++) {
            int64_t i = stored[k], start = i, stop = i + 1;
            if (k + AHEAD < n) {
                int64_t next = stored[k + AHEAD];
                next = ptr == NULL ? next : ptr[next];
                if (next >= 0 && next < most) {
                    __builtin_prefetch(rows + next * width);
                    __builtin_prefetch(rows + next * width + 64);
                }
            }
            if (ptr != NULL) {
                start = ptr[i];
                stop = ptr[i + 1];
            }
            if (start < 0 || stop < start || stop > most)
                return -1;
            int64_t bytes = (stop - start) * width, gives = (stop - start) * line->wide;
            if (gives > end - to)
                return -1;
            if (line->how == COPY)
                memcpy(to, rows + start * width, (size_t)bytes);
            else
                changed(to, rows + start * width, bytes, line,
                        line->how == SHIFT
                            ? (firsts == NULL ? 0 : firsts[k + list]) - atoms[i]
                            : 0);
            to += gives;
        }
    }
    return 0;
}

/* fill(scratch, bounds, outs, local): the rows of each field, lists one behind the other.
 * Numbers that are shifted become those of their list, or with `local` of their sample. */
static PyObject *plan_fill(PyObject *self, PyObject *args) {
    plan_t *plan = (plan_t *)self;
    PyObject *given[2], *outs, *found = NULL;
    int local;
    Py_buffer scratch, bounds;
    if (!PyArg_ParseTuple(args, "OOO!p", &given[0], &given[1], &PyList_Type, &outs, &local))
        return NULL;
    if (numbers_of(given[0], &scratch, PyBUF_SIMPLE) < 0)
        return NULL;
    if (numbers_of(given[1], &bounds, PyBUF_SIMPLE) < 0)
        goto held_one;
    Py_ssize_t n = bounds.len ? (Py_ssize_t)((const int64_t *)bounds.buf)[bounds.len / 8 - 1] : -1;
    Py_ssize_t w = lists_of(&bounds, n), held = 0;
    Py_buffer *targets = PyMem_Calloc((size_t)plan->num_lines + 1, sizeof(Py_buffer));
    if (targets == NULL) {
        PyErr_NoMemory();
        goto held_two;
    }
    if (w < 0 || n > scratch.len / 8 || scratch.len / 8 != scratch_size(plan, n, w) ||
        PyList_Size(outs) != plan->num_lines) {
        PyErr_SetString(PyExc_ValueError, "scratch, bounds and outs do not fit the plan");
        goto held_all;
    }
    const int64_t *stored = scratch.buf;
    for (; held < plan->num_lines; held++) {
        const line_t *line = &plan->lines[held];
        if (PyObject_GetBuffer(PyList_GetItem(outs, held), &targets[held], PyBUF_WRITABLE) < 0)
            goto held_all;
        Py_ssize_t each = line->how == COPY ? 1 : line->how == SHIFT ? line->size
                                             : line->how == WIDEN  ? 8
                                                                   : 4;
        if ((uintptr_t)targets[held].buf % (size_t)each != 0) {
            held++;
            PyErr_SetString(PyExc_ValueError, "numbers that are changed have to be aligned");
            goto held_all;
        }
    }
    for (Py_ssize_t k = 0; k < n; k++)
        if (stored[k] < 0 || stored[k] >= plan->samples) {
            PyErr_SetString(PyExc_ValueError, "scratch was not measured");
            goto held_all;
        }
    int wrong = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t f = 0; f < plan->num_lines && !wrong; f++)
        wrong = fill_line(plan, &plan->lines[f], &targets[f], stored, n, bounds.buf, w,
                          local ? NULL : stored + n);
    Py_END_ALLOW_THREADS
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "rows leave their field, or the memory given for them");
        goto held_all;
    }
    Py_INCREF(Py_None);
    found = Py_None;
held_all:
    for (Py_ssize_t i = 0; i < held; i++)
        PyBuffer_Release(&targets[i]);
    PyMem_Free(targets);
held_two:
    PyBuffer_Release(&bounds);
held_one:
    PyBuffer_Release(&scratch);
    return found;
}

static PyMethodDef plan_methods[] = {
    {"measure", plan_measure, METH_VARARGS, "Pointers of lists of samples."},
    {"fill", plan_fill, METH_VARARGS, "Rows of lists of samples."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "Fields of samples, to be gathered in any order."},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    "alchemi_xr.native._rows.Plan", sizeof(plan_t), 0, Py_TPFLAGS_DEFAULT, plan_slots,
};

/* -- maps ---------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    char *address;
    size_t reserved;
    Py_ssize_t length;
} mapping_t;

static void mapping_dealloc(PyObject *self) {
    mapping_t *held = (mapping_t *)self;
    PyTypeObject *type = Py_TYPE(self);
#ifdef CAN_MAP
    if (held->address != NULL)
        munmap(held->address, held->reserved);
#endif
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int mapping_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    mapping_t *held = (mapping_t *)self;
    return PyBuffer_FillInfo(view, self, held->address, held->length, 1, flags);
}

static PyType_Slot mapping_slots[] = {
    {Py_tp_dealloc, mapping_dealloc},
    {Py_bf_getbuffer, mapping_getbuffer},
    {Py_tp_doc, "Files mapped one behind the other, read-only."},
    {0, NULL},
};

static PyType_Spec mapping_spec = {
    "alchemi_xr.native._rows.Mapping", sizeof(mapping_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, mapping_slots,
};

static PyTypeObject *mapping_type = NULL;

/* map_files(paths, piece, length): each file gives `piece` bytes, the last what is left.
 *
 * `piece` has to be a multiple of the page size unless there is one file.
 * OSError with the file's name when one cannot be opened or mapped;
 * ValueError(number) when file `number` is too short: to read behind the end of
 * a mapped file would kill the process.
 */
static PyObject *rows_map_files(PyObject *self, PyObject *args) {
    PyObject *paths;
    Py_ssize_t piece, length;
    if (!PyArg_ParseTuple(args, "O!nn", &PyList_Type, &paths, &piece, &length))
        return NULL;
#ifndef CAN_MAP
    PyErr_SetString(PyExc_NotImplementedError, "files are not mapped on this system");
    return NULL;
#else
    Py_ssize_t count = PyList_Size(paths), page = (Py_ssize_t)sysconf(_SC_PAGESIZE);
    if (piece < 1 || length < 1 || count != (length + piece - 1) / piece ||
        (count > 1 && piece % page != 0)) {
        PyErr_SetString(PyExc_ValueError, "pieces do not fit the length or the pages");
        return NULL;
    }
    size_t reserved = (size_t)((length + page - 1) / page * page);
    char *address = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1, 0);
    if (address == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(paths, i); /* borrowed */
        char *path;
        Py_ssize_t ignored;
        if (item == NULL || PyBytes_AsStringAndSize(item, &path, &ignored) < 0)
            goto failed;
        size_t want = (size_t)(i == count - 1 ? length - i * piece : piece);
        struct stat facts;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &facts) < 0) {
            PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
            if (fd >= 0)
                close(fd);
            goto failed;
        }
        if ((size_t)facts.st_size < want) {
            close(fd);
            PyErr_SetObject(PyExc_ValueError, PyLong_FromSsize_t(i));
            goto failed;
        }
        void *at = mmap(address + i * piece, want, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
        int code = errno;
        close(fd);
        if (at == MAP_FAILED) {
            errno = code;
            PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
            goto failed;
        }
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(mapping_type, Py_tp_alloc);
    mapping_t *made = (mapping_t *)allocate(mapping_type, 0);
    if (made == NULL)
        goto failed;
    made->address = address;
    made->reserved = reserved;
    made->length = length;
    return (PyObject *)made;
failed:
    munmap(address, reserved);
    return NULL;
#endif
}

static PyMethodDef methods[] = {
    {"copy_ranges", rows_copy_ranges, METH_VARARGS, "Copy ranges of rows, each to its place."},
    {"gather", rows_gather, METH_VARARGS, "Copy the rows of samples, of many fields."},
    {"map_files", rows_map_files, METH_VARARGS, "Map files one behind the other, read-only."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", "Copies of rows, and mapped files.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    mapping_type = (PyTypeObject *)PyType_FromSpec(&mapping_spec);
    PyObject *plan_type = PyType_FromSpec(&plan_spec);
    if (mapping_type == NULL || plan_type == NULL || PyModule_AddObject(made, "Plan", plan_type) < 0) {
        Py_XDECREF(plan_type);
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
