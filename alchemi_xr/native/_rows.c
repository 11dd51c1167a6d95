/* Copies of ranges of rows, all fields of a batch in one call, without the GIL.
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

/* Copy n ranges [starts[i], stops[i]) of rows of `width` bytes, one behind the other. */
static void copy_ranges(char *target, const char *source, const int64_t *starts,
                        const int64_t *stops, Py_ssize_t n, size_t width) {
    for (Py_ssize_t i = 0; i < n; i++) {
        size_t bytes = (size_t)(stops[i] - starts[i]) * width;
        memcpy(target, source + (size_t)starts[i] * width, bytes);
        target += bytes;
    }
}

/* copy_ranges(target, source, starts, stops, n, width): addresses and counts as ints. */
static PyObject *rows_copy_ranges(PyObject *self, PyObject *args) {
    unsigned long long target, source, starts, stops;
    Py_ssize_t n, width;
    if (!PyArg_ParseTuple(args, "KKKKnn", &target, &source, &starts, &stops, &n, &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy_ranges((char *)(uintptr_t)target, (const char *)(uintptr_t)source,
                (const int64_t *)(uintptr_t)starts, (const int64_t *)(uintptr_t)stops, n,
                (size_t)width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_ranges", rows_copy_ranges, METH_VARARGS, "Copy ranges of rows, one behind the other."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", "Copies of ranges of rows.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
