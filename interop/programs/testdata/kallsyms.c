/*
 * /proc/kallsyms with our lines: by fopen and by open. The kernel's own lines stay as they are. The
 * arguments are the symbols that must be there, or with a '-' in front must not, unless the kernel has
 * them itself.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "self.h"

static char *whole(FILE *f, size_t *n)
{
	char *text = NULL;
	size_t room = 0;
	*n = 0;
	for (size_t k = 1; k; *n += k) {
		if (room - *n < 65536)
			WANT(text = realloc(text, room += 1 << 20));
		k = fread(text + *n, 1, room - *n - 1, f);
	}
	text[*n] = 0;
	return text;
}

static int count(const char *text, const char *symbol)
{
	int n = 0;
	for (const char *at = text; (at = strstr(at, symbol)); at++) {
		const char *end = at + strlen(symbol);
		n += at > text && at[-1] == ' ' && (*end == '\t' || *end == '\n');
	}
	return n;
}

int main(int argc, char **argv)
{
	size_t n, m;
	struct ibv_device **list = ibv_get_device_list(NULL);
	WANT(list);
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/kallsyms", O_RDONLY); /* as it is */
	char *real = calloc(1, 1);
	n = 0;
	if (fd >= 0) {
		FILE *f = fdopen(fd, "r");
		WANT(f && (real = whole(f, &n)));
		fclose(f);
	}
	FILE *f = fopen("/proc/kallsyms", "re");
	WANT(f);
	char *text = whole(f, &m);
	WANT(!fclose(f));
	/* The addresses may be hidden by now from one who had them, but not here. */
	WANT(m >= n && !memcmp(text, real, n));
	for (int i = 1; i < argc; i++) {
		int absent = argv[i][0] == '-';
		const char *symbol = argv[i] + absent;
		WANT(count(text, symbol) == (absent ? count(real, symbol) : 1));
	}
	WANT((fd = open("/proc/kallsyms", O_RDONLY | O_CLOEXEC)) >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
	WANT(f = fdopen(fd, "r"));
	size_t k;
	char *again = whole(f, &k);
	WANT(k == m && !memcmp(again, text, m) && !fclose(f));
	ibv_free_device_list(list);
	puts("ok");
	return 0;
}
