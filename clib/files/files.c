/*
 * Files that programs read besides calling libibverbs, and that only a kernel driver
 * has: /dev/infiniband/uverbsN, and the files of a device in sysfs. "verbena exec"
 * preloads this library. It asks the libibverbs that the program has loaded what a path
 * is (front/sysfs.c). Where none is loaded, it only calls the C library's functions.
 *
 * A file of sysfs is opened as a memfd with its text. Directories cannot be listed. A link has a
 * real path, and is otherwise as a directory without files. The nodes
 * of a graphics device are in drm.c. Some files of the kernel get lines of ours (append.c).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "append.h"
#include "dmabuf.h"
#include "drm.h"
#include "files.h"

#define PUBLIC __attribute__((visibility("default")))

/* Programs that were built for a C library before 2.33 call these for stat. */
int __xstat(int version, const char *path, struct stat *to);
int __xstat64(int version, const char *path, struct stat64 *to);

/* What programs call that were built with _FORTIFY_SOURCE. */
char *__realpath_chk(const char *path, char *to, size_t size);
ssize_t __readlink_chk(const char *path, char *to, size_t n, size_t size);
ssize_t __readlinkat_chk(int dir, const char *path, char *to, size_t n, size_t size);

/* next_open() and so on return the C library's functions. They are looked up at load:
 * later the program may be in a signal handler, or a child of fork(). */
#define FUNCTIONS(X)                                                                                                   \
	X(open) X(open64) X(openat) X(openat64) X(fopen) X(fopen64) X(access) X(stat) X(stat64) X(__xstat) X(__xstat64) X(ioctl) X(close)   \
	X(realpath) X(__realpath_chk) X(canonicalize_file_name) X(readlink) X(__readlink_chk) X(readlinkat) X(__readlinkat_chk)
#define DEFINE_NEXT(name)                                                                                              \
	static __typeof__(&name) next_##name(void)                                                                     \
	{                                                                                                              \
		static __typeof__(&name) found;                                                                        \
		if (!found)                                                                                            \
			found = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                            \
		return found;                                                                                          \
	}
FUNCTIONS(DEFINE_NEXT)

__attribute__((constructor)) static void at_load(void)
{
#define FIND(name) (void)next_##name();
	FUNCTIONS(FIND)
}

/* look returns what a path is, and writes the text of a file. */
static enum vb_file look(const char *path, char *text)
{
	if (!path || (strncmp(path, "/sys/class/infiniband", 21) && strncmp(path, "/dev/infiniband/", 16) &&
		      strncmp(path, "/sys/kernel/mm/memory_peers", 27) && strncmp(path, "/boot/config-", 13) &&
		      strcmp(path, "/proc/kallsyms") && strcmp(path, "/proc/self/maps") && strcmp(path, "/dev/kfd") &&
		      strcmp(path, "/sys/module/nvidia_peermem/version")))
		return VB_NO_FILE;
	int err = errno;
	void *lib = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
	vb_file_function *f = lib ? (vb_file_function *)dlsym(lib, "verbena_file") : NULL;
	enum vb_file what = f ? f(path, text) : VB_NO_FILE;
	if (lib)
		dlclose(lib);
	errno = err;
	return what;
}

/* contents opens a memfd with a text, for reading only. */
static int contents(const char *text, int flags)
{
	if ((flags & O_ACCMODE) != O_RDONLY) {
		errno = EACCES;
		return -1;
	}
	int fd = memfd_create("verbena", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	size_t n = strlen(text);
	if (fd >= 0 && (write(fd, text, n) != (ssize_t)n || lseek(fd, 0, SEEK_SET))) {
		close(fd);
		errno = EIO;
		return -1;
	}
	return fd;
}

/* changed opens a file of the kernel that reads otherwise. */
static int changed(const char *path, enum vb_file how, const char *text, int flags)
{
	int err = errno, from = next_open()(path, O_RDONLY | O_CLOEXEC);
	int fd = how == VB_APPENDED ? vb_open_appended(from, text, flags) : vb_open_replaced(from, text, flags);
	if (from >= 0)
		close(from);
	if (fd >= 0)
		errno = err;
	return fd;
}

/* OPEN defines open and its variants. They open our files, and pass on other paths. */
#define OPEN(name, params, path, ...)                                                                                  \
	PUBLIC int name params                                                                                         \
	{                                                                                                              \
		char text[VB_FILE_ROOM];                                                                               \
		va_list more;                                                                                          \
		va_start(more, flags);                                                                                 \
		bool makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;                                      \
		mode_t mode = makes ? va_arg(more, mode_t) : 0;                                                        \
		va_end(more);                                                                                          \
		if (vd_is_node(path))                                                                                  \
			return vd_open(path, flags);                                                                   \
		enum vb_file what = look(path, text);                                                                  \
		switch (what) {                                                                                        \
		case VB_TEXT:                                                                                          \
			return contents(text, flags);                                                                  \
		case VB_APPENDED:                                                                                      \
		case VB_REPLACED:                                                                                      \
			if ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_PATH))                                      \
				return changed(path, what, text, flags);                                               \
			break;                                                                                         \
		case VB_CHAR_DEVICE:                                                                                   \
			path = "/dev/null";                                                                            \
			break;                                                                                         \
		default:                                                                                               \
			break;                                                                                         \
		}                                                                                                      \
		return next_##name()(__VA_ARGS__, flags, mode);                                                           \
	}
OPEN(open, (const char *path, int flags, ...), path, path)
OPEN(open64, (const char *path, int flags, ...), path, path)
OPEN(openat, (int dir, const char *path, int flags, ...), path, dir, path)
OPEN(openat64, (int dir, const char *path, int flags, ...), path, dir, path)

#define FOPEN(name)                                                                                                    \
	PUBLIC FILE *name(const char *path, const char *mode)                                                          \
	{                                                                                                              \
		char text[VB_FILE_ROOM];                                                                               \
		enum vb_file what = look(path, text);                                                                  \
		bool reads = mode[0] == 'r' && !strchr(mode, '+');                                                     \
		if (what != VB_TEXT && ((what != VB_APPENDED && what != VB_REPLACED) || !reads))                       \
			return next_##name()(path, mode);                                                                 \
		int flags = (reads ? O_RDONLY : O_RDWR) | (strchr(mode, 'e') ? O_CLOEXEC : 0);                         \
		int fd = what == VB_TEXT ? contents(text, flags) : changed(path, what, text, flags);                   \
		return fd < 0 ? NULL : fdopen(fd, mode);                                                               \
	}
FOPEN(fopen)
FOPEN(fopen64)

/* likeness returns, for a file of ours, a kernel's file with the same attributes; otherwise
 * the path. */
static const char *likeness(const char *path)
{
	char text[VB_FILE_ROOM];
	if (vd_is_node(path))
		return "/dev/null";
	switch (look(path, text)) {
	case VB_TEXT:
		return "/proc/sys/kernel/ostype"; /* everybody may read it */
	case VB_CHAR_DEVICE:
		return "/dev/null";
	case VB_DIRECTORY:
	case VB_LINK:
		return "/sys/class";
	default:
		return path;
	}
}

PUBLIC int access(const char *path, int mode) { return next_access()(likeness(path), mode); }
PUBLIC int stat(const char *path, struct stat *to) { return next_stat()(likeness(path), to); }
PUBLIC int stat64(const char *path, struct stat64 *to) { return next_stat64()(likeness(path), to); }
PUBLIC int __xstat(int version, const char *path, struct stat *to) { return next___xstat()(version, likeness(path), to); }
PUBLIC int __xstat64(int version, const char *path, struct stat64 *to)
{
	return next___xstat64()(version, likeness(path), to);
}

/* linked returns whether a path is a link of ours, and writes where it leads. */
static bool linked(const char *path, char *text) { return look(path, text) == VB_LINK; }

/* resolved returns a text as realpath returns a path. */
static char *resolved(char *to, const char *text) { return to ? strcpy(to, text) : strdup(text); }

/* REALPATH defines realpath and its variants. A program that was built with _FORTIFY_SOURCE says how much room there is:
 * PATH_MAX at least, which is more than a text. */
#define REALPATH(name, params, to, ...)                                                                                \
	PUBLIC char *name params                                                                                       \
	{                                                                                                              \
		char text[VB_FILE_ROOM];                                                                               \
		if (!linked(path, text))                                                                               \
			return next_##name()(__VA_ARGS__);                                                             \
		return resolved(to, text);                                                                             \
	}
REALPATH(realpath, (const char *path, char *to), to, path, to)
REALPATH(__realpath_chk, (const char *path, char *to, size_t size), to, path, to, size)
REALPATH(canonicalize_file_name, (const char *path), NULL, path)

/* READLINK defines readlink and its variants. */
#define READLINK(name, params, ...)                                                                                    \
	PUBLIC ssize_t name params                                                                                     \
	{                                                                                                              \
		char text[VB_FILE_ROOM];                                                                               \
		if (!n || !linked(path, text))                                                                         \
			return next_##name()(__VA_ARGS__);                                                             \
		size_t have = strlen(text) < n ? strlen(text) : n;                                                     \
		memcpy(to, text, have);                                                                                \
		return (ssize_t)have;                                                                                  \
	}
READLINK(readlink, (const char *path, char *to, size_t n), path, to, n)
READLINK(readlinkat, (int dir, const char *path, char *to, size_t n), dir, path, to, n)

/* The variants with a check: the C library ends a program that has not so much room. */
#define CHECKED(name, params, call, ...)                                                                               \
	PUBLIC ssize_t name params { return n > size ? next_##name()(__VA_ARGS__) : call; }
CHECKED(__readlink_chk, (const char *path, char *to, size_t n, size_t size), readlink(path, to, n), path, to, n, size)
CHECKED(__readlinkat_chk, (int dir, const char *path, char *to, size_t n, size_t size), readlinkat(dir, path, to, n), dir, path, to, n, size)

/* The requests of drivers that drm.c stands for; others are passed on. */
PUBLIC int ioctl(int fd, unsigned long request, ...)
{
	va_list more;
	va_start(more, request);
	void *arg = va_arg(more, void *);
	va_end(more);
	int result;
	if (vd_ioctl(fd, request, arg, &result) || verbena_dmabuf_ioctl(fd, request, arg, &result))
		return result;
	return next_ioctl()(fd, request, arg);
}

PUBLIC int close(int fd)
{
	int result = next_close()(fd);
	vd_closed();
	return result;
}
