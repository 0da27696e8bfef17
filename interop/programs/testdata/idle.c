/*
 * A program that is linked with the library and calls no verb that needs a device:
 * it has one thread, and no Go runtime.
 */
#include <dirent.h>

#include "self.h"

int main(void)
{
	WANT(!strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success"));
	WANT(!ibv_fork_init());
	int threads = 0;
	DIR *d = opendir("/proc/self/task");
	WANT(d);
	for (struct dirent *e; (e = readdir(d));)
		threads += e->d_name[0] != '.';
	closedir(d);
	WANT(threads == 1);
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	WANT(maps);
	while (fgets(line, sizeof line, maps))
		WANT(!strstr(line, "libverbena-backend"));
	fclose(maps);
	puts("ok");
	return 0;
}
