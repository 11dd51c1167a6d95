/* Copies of ranges of rows, all fields of a batch in one call, without the GIL;
 * and chunk files mapped one behind the other, as the flat array that they are.
 *
 * The caller has already said everything that needs thought: which rows, in
 * which order, where they go. What is left is addresses and byte counts, so
 * there is nothing here about dtypes, and nothing that can fail but a wrong
 * argument: bounds are checked by the Python side (alchemi_xr/native/rows.py).
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

/* Copy n ranges [starts[i], stops[i]) of rows of `width` bytes to rows targets[i] on. */
static void copy_ranges(char *target, const int64_t *targets, const char *source,
                        const int64_t *starts, const int64_t *stops, Py_ssize_t n,
                        int64_t width) {
    for (Py_ssize_t i = 0; i < n; i++)
        memcpy(target + targets[i] * width, source + starts[i] * width,
               (size_t)((stops[i] - starts[i]) * width));
}

/* copy_ranges(target, targets, source, starts, stops, n, width): addresses and counts. */
static PyObject *rows_copy_ranges(PyObject *self, PyObject *args) {
    unsigned long long target, targets, source, starts, stops;
    Py_ssize_t n, width;
    if (!PyArg_ParseTuple(args, "KKKKKnn", &target, &targets, &source, &starts, &stops, &n,
                          &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy_ranges((char *)(uintptr_t)target, (const int64_t *)(uintptr_t)targets,
                (const char *)(uintptr_t)source, (const int64_t *)(uintptr_t)starts,
                (const int64_t *)(uintptr_t)stops, n, width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
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
    if (mapping_type == NULL) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
