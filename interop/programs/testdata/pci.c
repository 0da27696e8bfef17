/*
 * The link to a device's PCI device, by all functions that follow links. The arguments are where it leads, one for each
 * device; "-" for one that has none.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "self.h"

/* What programs call that were built with _FORTIFY_SOURCE. */
char *__realpath_chk(const char *path, char *to, size_t size);
ssize_t __readlink_chk(const char *path, char *to, size_t n, size_t size);
ssize_t __readlinkat_chk(int dir, const char *path, char *to, size_t n, size_t size);

static void leads(const char *path, const char *want)
{
	char to[PATH_MAX], *made = realpath(path, NULL);
	ssize_t n = (ssize_t)strlen(want);
	WANT(made && !strcmp(made, want));
	free(made);
	WANT(realpath(path, to) == to && !strcmp(to, want));
	memset(to, 0, sizeof to);
	WANT(__realpath_chk(path, to, sizeof to) == to && !strcmp(to, want));
	made = canonicalize_file_name(path);
	WANT(made && !strcmp(made, want));
	free(made);
	memset(to, 'x', sizeof to);
	WANT(readlink(path, to, sizeof to) == n && !memcmp(to, want, (size_t)n) && to[n] == 'x');
	memset(to, 'x', sizeof to);
	WANT(readlink(path, to, 5) == 5 && !memcmp(to, want, 5) && to[5] == 'x');
	WANT(readlinkat(AT_FDCWD, path, to, sizeof to) == n && !memcmp(to, want, (size_t)n));
	WANT(__readlink_chk(path, to, sizeof to, sizeof to) == n && !memcmp(to, want, (size_t)n));
	WANT(__readlinkat_chk(AT_FDCWD, path, to, sizeof to, sizeof to) == n && !memcmp(to, want, (size_t)n));
	errno = 0;
	WANT(readlink(path, to, 0) < 0 && errno);
	struct stat st;
	WANT(!stat(path, &st) && S_ISDIR(st.st_mode) && !access(path, R_OK));
}

static void leads_nowhere(const char *path)
{
	char to[PATH_MAX];
	struct stat st;
	WANT(!realpath(path, NULL) && errno == ENOENT && !canonicalize_file_name(path) && errno == ENOENT);
	WANT(readlink(path, to, sizeof to) < 0 && errno == ENOENT);
	WANT(stat(path, &st) && errno == ENOENT && access(path, F_OK) && errno == ENOENT);
}

int main(int argc, char **argv)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	WANT(list && n == argc - 1);
	for (int i = 0; i < n; i++) {
		char path[512];
		snprintf(path, sizeof path, "%s/device", list[i]->ibdev_path);
		if (!strcmp(argv[1 + i], "-"))
			leads_nowhere(path);
		else
			leads(path, argv[1 + i]);
		snprintf(path, sizeof path, "%s/devices", list[i]->ibdev_path);
		leads_nowhere(path);
	}
	ibv_free_device_list(list);

	/* Links that are not ours. */
	char to[PATH_MAX], self[32];
	ssize_t len = readlink("/proc/self", to, sizeof to);
	snprintf(self, sizeof self, "%d", (int)getpid());
	WANT(len == (ssize_t)strlen(self) && !memcmp(to, self, (size_t)len));
	WANT(realpath("/proc/../proc/.", to) == to && !strcmp(to, "/proc"));
	WANT(!realpath(NULL, to) && errno == EINVAL);
	puts("ok");
	return 0;
}
