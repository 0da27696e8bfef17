/*
 * What the preloaded files.c asks libibverbs.so.1 for.
 */
#ifndef VERBENA_FILES_H
#define VERBENA_FILES_H

enum vb_file {
	VB_NO_FILE,
	VB_TEXT,
	VB_CHAR_DEVICE,
	VB_DIRECTORY,
	VB_APPENDED, /* a file of the kernel, with a text behind it (append.c) */
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

#endif
