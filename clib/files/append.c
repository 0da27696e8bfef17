/*
 * Files of the kernel that read otherwise. First, those with lines of ours behind theirs: /proc/kallsyms, where libfabric looks whether
 * the kernel has dma-bufs for RDMA, and its configuration, where UCX looks whether it has those of GPUs.
 *
 * The file is copied into a memfd, and behind it come the lines whose last word the kernel's file does
 * not have. The kernel's own lines stay as they are.
 *
 * Second, /proc/self/maps, where UCX looks for memory that drivers of GPUs have mapped: it finds their names in the
 * place of those of our files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "append.h"

/* write_all reports whether all bytes were written. */
static bool write_all(int fd, const char *b, size_t n)
{
	while (n) {
		ssize_t k = write(fd, b, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		b += k;
		n -= (size_t)k;
	}
	return true;
}

/* copy copies what is left of a file, and adds its length to n. */
static bool copy(int from, int to, size_t *n)
{
	char b[16384];
	for (;;) {
		ssize_t k = read(from, b, sizeof b);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return !k;
		if (!write_all(to, b, (size_t)k))
			return false;
		*n += (size_t)k;
	}
}

/* has reports whether a file has the word of a line: what lies between its last blank and its tab or its
 * end. */
static bool has(const char *file, size_t size, const char *line, size_t n)
{
	const char *word = memrchr(line, ' ', n), *end = memchr(line, '\t', n);
	if (!word || !file)
		return false;
	size_t len = (size_t)((end ? end : line + n) - word);
	for (const char *at = file, *last = file + size; (at = memmem(at, (size_t)(last - at), word, len)); at += len)
		if (at + len == last || at[len] == '\n' || at[len] == '\t')
			return true;
	return false;
}

/* append writes those lines of a text behind the n bytes of a file that the file does not have. */
static bool append(int fd, size_t n, const char *text)
{
	const char *file = n ? mmap(NULL, n, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
	bool ok = file != MAP_FAILED;
	for (const char *end; ok && *text; text = end + 1) {
		end = strchrnul(text, '\n');
		if (!has(file, n, text, (size_t)(end - text)))
			ok = write_all(fd, text, (size_t)(end - text)) && write_all(fd, "\n", 1);
		if (!*end)
			break;
	}
	if (file && file != MAP_FAILED)
		munmap((void *)file, n);
	return ok;
}

int vb_open_appended(int from, const char *text, int flags)
{
	int fd = memfd_create("verbena", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	size_t n = 0;
	if (fd < 0)
		return -1;
	if ((from >= 0 && !copy(from, fd, &n)) || !append(fd, n, text) || lseek(fd, 0, SEEK_SET)) {
		close(fd);
		errno = EIO;
		return -1;
	}
	return fd;
}

/* replace copies a file, and writes the text to where it finds another one. */
static bool replace(const char *file, size_t n, int to, const char *find, size_t len, const char *put)
{
	for (const char *at = file, *end = file + n; at < end;) {
		const char *next = memmem(at, (size_t)(end - at), find, len);
		if (!write_all(to, at, (size_t)((next ? next : end) - at)) || (next && !write_all(to, put, strlen(put))))
			return false;
		at = next ? next + len : end;
	}
	return true;
}

int vb_open_replaced(int from, const char *text, int flags)
{
	const char *line = strchr(text, '\n');
	int whole = memfd_create("verbena", MFD_CLOEXEC), fd = memfd_create("verbena", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	size_t n = 0;
	bool ok = line && from >= 0 && whole >= 0 && fd >= 0 && copy(from, whole, &n) && n;
	const char *file = ok ? mmap(NULL, n, PROT_READ, MAP_PRIVATE, whole, 0) : MAP_FAILED;
	ok = file != MAP_FAILED && replace(file, n, fd, text, (size_t)(line - text), line + 1) && !lseek(fd, 0, SEEK_SET);
	if (file != MAP_FAILED)
		munmap((void *)file, n);
	if (whole >= 0)
		close(whole);
	if (!ok && fd >= 0) {
		close(fd);
		fd = -1;
		errno = EIO;
	}
	return fd;
}
