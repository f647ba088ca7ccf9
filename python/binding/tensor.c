/*
 * The result of __dlpack__ for an array in a device's memory: the description that frameworks take, in the two forms of
 * the DLPack interface. It keeps a Python object alive until the framework that took it calls its deleter.
 */
#include <stdlib.h>
#include <string.h>

typedef struct dlpack_tensor {
    void *data;
    int32_t device_type, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* strides NULL: the last axis runs fastest */
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_plain {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_plain *self);
} dlpack_plain;

typedef struct dlpack_versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct dlpack_versioned *self);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_versioned;

#define DLPACK_CUDA 2
#define DLPACK_MAJOR 1

/* May be called on any thread, and even after the interpreter has ended. */
static void let_go(void *owner) {
    if (!Py_IsInitialized())
        return;
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)owner);
    PyGILState_Release(state);
}

static void free_plain(dlpack_plain *self) {
    let_go(self->context);
    free(self);
}

static void free_versioned(dlpack_versioned *self) {
    let_go(self->context);
    free(self);
}

/* The destructor of capsules. A framework that takes the tensor renames the capsule, so that only others are freed. */
static void drop_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dlpack_plain *kept = PyCapsule_GetPointer(capsule, "dltensor");
        kept->deleter(kept);
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dlpack_versioned *kept = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        kept->deleter(kept);
    }
}

/* Returns the destructor of capsules that hold a managed tensor. */
static void *python_tensor_destructor(void) {
    return (void *)drop_capsule;
}

/* Fills in a description. The shape is copied to `behind`, which follows the description in the same allocation. */
static void describe(dlpack_tensor *out, int64_t *behind, void *address, int device, int code, int bits,
                     int dimensions, const int64_t *shape) {
    memcpy(behind, shape, (size_t)dimensions * sizeof *shape);
    *out = (dlpack_tensor){.data = address,
                           .device_type = DLPACK_CUDA,
                           .device_id = device,
                           .dimensions = dimensions,
                           .code = (uint8_t)code,
                           .bits = (uint8_t)bits,
                           .lanes = 1,
                           .shape = behind};
}

static void *make_plain(void *owner, size_t behind) {
    dlpack_plain *made = calloc(1, sizeof *made + behind);
    if (made) {
        made->context = owner;
        made->deleter = free_plain;
    }
    return made;
}

static void *make_versioned(void *owner, size_t behind) {
    dlpack_versioned *made = calloc(1, sizeof *made + behind);
    if (made) {
        made->major = DLPACK_MAJOR;
        made->context = owner;
        made->deleter = free_versioned;
    }
    return made;
}

/* Makes a managed tensor that keeps the object `owner` alive, in the form with a version or in the older form without;
 * NULL: no memory. */
static void *python_tensor(void *owner, bool versioned, void *address, int device, int code, int bits,
                           int dimensions, int64_t *shape) {
    const size_t behind = (size_t)dimensions * sizeof *shape;
    void *made = versioned ? make_versioned(owner, behind) : make_plain(owner, behind);
    if (!made)
        return NULL;
    dlpack_tensor *tensor = versioned ? &((dlpack_versioned *)made)->tensor : &((dlpack_plain *)made)->tensor;
    char *end = (char *)made + (versioned ? sizeof(dlpack_versioned) : sizeof(dlpack_plain));
    describe(tensor, (int64_t *)(void *)end, address, device, code, bits, dimensions, shape);
    PyGILState_STATE state = PyGILState_Ensure(); /* cffi calls without the GIL */
    Py_INCREF((PyObject *)owner);
    PyGILState_Release(state);
    return made;
}
