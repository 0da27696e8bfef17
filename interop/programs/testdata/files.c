/*
 * The files that a kernel driver would have, by all functions that open or stat a file. They
 * exist once the device was listed, and contain what the verbs return.
 */
#include <endian.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "self.h"

/* The library has it, but no header that programs include. */
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);

static char *path_of(const char *dir, const char *rest)
{
	static char path[1024];
	snprintf(path, sizeof path, "%s%s", dir, rest);
	return path;
}

/* says checks that a file contains a line. */
static void says(const char *dir, const char *file, const char *line)
{
	char text[256] = "", *path = path_of(dir, file);
	FILE *f = fopen(path, "r");
	WANT(f && fgets(text, sizeof text, f) && !fclose(f));
	text[strcspn(text, "\n")] = 0;
	WANT(!strcmp(text, line));
	int fd = open(path, O_RDONLY);
	memset(text, 0, sizeof text);
	WANT(fd >= 0 && read(fd, text, sizeof text) == (ssize_t)strlen(line) + 1 && !close(fd));
	WANT(!strncmp(text, line, strlen(line)) && text[strlen(line)] == '\n');
	WANT(ibv_read_sysfs_file(dir, file + 1, text, sizeof text) == (int)strlen(line) && !strcmp(text, line));
	WANT(open(path, O_WRONLY) < 0 && errno == EACCES);
	struct stat st;
	WANT(!stat(path, &st) && S_ISREG(st.st_mode) && !access(path, R_OK));
}

int main(void)
{
	struct stat st;
	WANT(open("/dev/infiniband/uverbs0", O_RDWR) < 0 && errno == ENOENT); /* no device was listed yet */
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	WANT(list && n == 1);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	WANT(ctx);

	char *node = path_of("/dev/infiniband/", list[0]->dev_name);
	WANT(!stat(node, &st) && S_ISCHR(st.st_mode) && !access(node, R_OK | W_OK));
	int fd = open(node, O_RDWR | O_CLOEXEC);
	WANT(fd >= 0 && !close(fd));

	const char *dir = list[0]->ibdev_path;
	char text[128];
	union ibv_gid gid;
	for (int i = 0; !ibv_query_gid(ctx, 1, i, &gid); i++) {
		char file[64], *p = text;
		for (int k = 0; k < 16; k += 2)
			p += sprintf(p, "%s%02x%02x", k ? ":" : "", gid.raw[k], gid.raw[k + 1]);
		sprintf(file, "/ports/1/gids/%d", i);
		says(dir, file, text);
		sprintf(file, "/ports/1/gid_attrs/types/%d", i);
		says(dir, file, "RoCE v2");
		sprintf(file, "/ports/1/gid_attrs/ndevs/%d", i);
		says(dir, file, "lo");
	}
	says(dir, "/ports/1/link_layer", "Ethernet");
	says(dir, "/node_type", "1: CA");
	uint64_t guid = be64toh(ibv_get_device_guid(list[0]));
	sprintf(text, "%04x:%04x:%04x:%04x", (int)(guid >> 48), (int)(guid >> 32 & 0xffff), (int)(guid >> 16 & 0xffff),
		(int)(guid & 0xffff));
	says(dir, "/node_guid", text);
	says(list[0]->dev_path, "/ibdev", list[0]->name);
	WANT(!stat(dir, &st) && S_ISDIR(st.st_mode));

	/* Files that do not exist, and files that are not ours. */
	const char *none[] = {"/ports/1/gids/99", "/ports/1/gids/0x", "/ports/2/gids/0", "/ports/1/gid_attrs/types/99", "/x", "0"};
	for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
		WANT(open(path_of(dir, none[i]), O_RDONLY) < 0 && errno == ENOENT);
		WANT(access(path_of(dir, none[i]), F_OK) && errno == ENOENT && !fopen(path_of(dir, none[i]), "r"));
	}
	WANT(stat("/dev/infiniband/uverbs99", &st) && errno == ENOENT);
	char name[] = "/tmp/verbena-files-XXXXXX";
	fd = mkstemp(name);
	WANT(fd >= 0 && !close(fd) && !unlink(name) && (fd = open(name, O_CREAT | O_WRONLY | O_EXCL, 0640)) >= 0);
	WANT(!fstat(fd, &st) && (st.st_mode & 0777) == 0640 && !unlink(name));
	const char *volatile nowhere = NULL;
	WANT(open(nowhere, O_RDONLY) < 0 && errno == EFAULT);
	ibv_free_device_list(list);
	WANT(!ibv_close_device(ctx));
	puts("ok");
	return 0;
}
