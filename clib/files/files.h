/*
 * What the preloaded files.c asks libibverbs.so.1 for.
 */
#ifndef VERBENA_FILES_H
#define VERBENA_FILES_H

#include <stdint.h>

enum vb_file {
	VB_NO_FILE,
	VB_TEXT,
	VB_CHAR_DEVICE,
	VB_DIRECTORY,
	VB_APPENDED, /* a file of the kernel, with a text behind it (append.c) */
	VB_LINK,     /* a link to a directory: the text is its path, without links; it may be one of the kernel's */
	VB_REPLACED, /* a file of the kernel: where the text's first line occurs, it has the second one */
};
enum { VB_FILE_ROOM = 256 };

/* verbena_file returns what a path is. If it is a file with a text, it writes that, for
 * which there are VB_FILE_ROOM bytes. */
typedef enum vb_file vb_file_function(const char *path, char *text);
vb_file_function verbena_file;

/* verbena_export_file returns a descriptor of the dma-buf of a memory file, and
 * verbena_dmabuf_file one of the memory file of such a dma-buf; or a negative errno. */
int verbena_export_file(int file);
int verbena_dmabuf_file(int fd);

/* What a program that uses CUDA gives up. */
enum vb_cuda {
	VB_CUDA_ALLOCATION = 1, /* the allocation that begins at addr, or was opened there; size 0: CUDA does not say it */
	VB_CUDA_RANGE,		/* what is mapped from addr on, size bytes */
	VB_CUDA_CONTEXT,	/* addr is the handle of a context: all of its memory */
	VB_CUDA_DEVICE,		/* addr is a device's number: all memory of its primary context */
	VB_CUDA_HOST,		/* page-locked memory of the host that begins at addr */
	VB_CUDA_RELEASE,	/* addr is a device's number: its primary context gets one user less. If that was the last
				 * one, VB_CUDA_DEVICE follows when the memory is gone: CUDA does not say it before */
};

/* verbena_cuda_gone is called before memory of CUDA is freed. verbena_cuda_exported is called when CUDA has made a dma-buf
 * of a range of its memory. */
typedef void vb_cuda_gone_function(int what, uint64_t addr, uint64_t size);
typedef void vb_cuda_exported_function(int fd, uint64_t addr, uint64_t size);
int verbena_cuda_watches(void); /* of the preloaded library */
vb_cuda_gone_function verbena_cuda_gone;
vb_cuda_exported_function verbena_cuda_exported;

#endif
