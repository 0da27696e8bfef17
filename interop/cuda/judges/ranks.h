// How rank 0 passes an id to the others: by a file.

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// write_id writes n bytes to a file that others see whole or not at all. It returns NULL, or why it could not.
static const char *write_id(const char *path, const void *id, size_t n)
{
	char fresh[4096];
	snprintf(fresh, sizeof fresh, "%s.new", path);
	FILE *f = fopen(fresh, "wb");
	if (!f || fwrite(id, n, 1, f) != 1 || fclose(f) != 0 || rename(fresh, path) != 0)
		return strerror(errno);
	return NULL;
}

// read_id waits for the file, so many seconds, and reads n bytes. It returns NULL, or why it could not.
static const char *read_id(const char *path, void *id, size_t n, int seconds)
{
	for (int i = 0; i < seconds * 100; i++, usleep(10000)) {
		FILE *f = fopen(path, "rb");
		if (!f)
			continue;
		size_t k = fread(id, n, 1, f);
		fclose(f);
		if (k == 1)
			return NULL;
	}
	return "rank 0 has written no id";
}
