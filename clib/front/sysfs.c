/*
 * The files that sysfs would have for our devices. A program reads them by
 * ibv_read_sysfs_file or, if files.c is preloaded, by opening them. Only values that do
 * not change are here: for the others there are verbs.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "../files/files.h"
#include "front.h"
#include "ucma.h"

#define CLASS "/sys/class/infiniband/"
#define CONFIGURATION "/boot/config-"
#define PCI_DEVICES "/sys/bus/pci/devices/"
#define VERBS_CLASS "/sys/class/infiniband_verbs/"
#define NODES "/dev/infiniband/"

/* print_groups prints n bytes as sysfs does: groups of four hexadecimal digits. */
static void print_groups(char *to, const uint8_t *b, int n)
{
	for (int i = 0; i < n; i += 2)
		to += sprintf(to, "%s%02x%02x", i ? ":" : "", b[i], b[i + 1]);
	strcpy(to, "\n");
}

/* of_gid is verbena_file for a file of the GID table; rest is its path below the port. */
static enum vb_file of_gid(struct vb_device *d, const char *rest, char *text)
{
	union ibv_gid all[VB_MAX_GIDS];
	struct backend *b = vb_backend();
	int64_t n = b ? b->vbe_gids_of(d->pub.name, all[0].raw, VB_MAX_GIDS) : 0;
	unsigned int i;
	int end = 0;
	if (sscanf(rest, "gids/%u%n", &i, &end) == 1 && !rest[end] && i < n) {
		print_groups(text, all[i].raw, 16);
		return VB_TEXT;
	}
	if (sscanf(rest, "gid_attrs/types/%u%n", &i, &end) == 1 && !rest[end] && i < n) {
		strcpy(text, "RoCE v2\n");
		return VB_TEXT;
	}
	if (sscanf(rest, "gid_attrs/ndevs/%u%n", &i, &end) == 1 && !rest[end] && i < n && d->interface[0]) {
		snprintf(text, VB_FILE_ROOM, "%s\n", d->interface);
		return VB_TEXT;
	}
	return VB_NO_FILE;
}

/* pci_device is verbena_file for the link to a device's PCI device, if VERBENA_PCI names one: by the number that the
 * device has in its name. A PCI device that the kernel does not know is shown on a bus of its own. */
static enum vb_file pci_device(struct vb_device *d, char *text)
{
	const char *list = vb_setting("VERBENA_PCI"), *name = vb_setting("VERBENA_NAME"), *number = d->pub.name;
	if (!name || !*name || strncmp(number, name, strlen(name)))
		name = "verbena";
	if (!strncmp(number, name, strlen(name)))
		number += strlen(name);
	for (unsigned long i = strtoul(number, NULL, 10); list && i; i--) {
		list = strchr(list, ',');
		list += list != NULL;
	}
	unsigned int domain, bus, slot, function;
	if (!list || sscanf(list, " %8x:%2x:%2x.%1x", &domain, &bus, &slot, &function) != 4)
		return VB_NO_FILE;
	char path[64], real[PATH_MAX];
	snprintf(path, sizeof path, PCI_DEVICES "%04x:%02x:%02x.%x", domain, bus, slot, function);
	if (realpath(path, real) && strlen(real) < VB_FILE_ROOM)
		strcpy(text, real);
	else
		snprintf(text, VB_FILE_ROOM, "/sys/devices/pci%04x:%02x/%s", domain, bus, path + strlen(PCI_DEVICES));
	return VB_LINK;
}

/* of_device is verbena_file for a path below a device's directory. */
static enum vb_file of_device(struct vb_device *d, const char *rest, char *text)
{
	static const char *const directories[] = {
		"", "ports", "ports/1", "ports/1/gids", "ports/1/gid_attrs", "ports/1/gid_attrs/types", "ports/1/gid_attrs/ndevs"};
	for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
		if (!strcmp(rest, directories[i]))
			return VB_DIRECTORY;
	if (!strcmp(rest, "device"))
		return pci_device(d, text);
	if (!strncmp(rest, "ports/1/gid", 11))
		return of_gid(d, rest + 8, text);
	if (!strcmp(rest, "node_type"))
		strcpy(text, "1: CA\n");
	else if (!strcmp(rest, "node_guid") || !strcmp(rest, "sys_image_guid")) {
		uint64_t guid = ibv_get_device_guid(&d->pub);
		print_groups(text, (const uint8_t *)&guid, 8);
	} else if (!strcmp(rest, "ports/1/link_layer"))
		strcpy(text, "Ethernet\n");
	else
		return VB_NO_FILE;
	return VB_TEXT;
}

/* symbols is verbena_file for /proc/kallsyms. libfabric looks there whether the kernel has dma-bufs for
 * RDMA, and PeerDirect; UCX from 1.20 on, whether it has dma-bufs of GPUs. */
static enum vb_file symbols(char *text)
{
	bool buffers = !vb_hides("dmabuf"), peers = vb_has_peers(), gpus = buffers && vb_has_gpus();
	snprintf(text, VB_FILE_ROOM, "%s%s%s", buffers ? "0000000000000000 T ib_umem_dmabuf_get\t[ib_uverbs]\n" : "",
		 peers ? "0000000000000000 T ib_register_peer_memory_client\t[ib_core]\n" : "",
		 gpus ? "0000000000000000 T dma_buf_move_notify\n0000000000000000 T pci_p2pdma_distance_many\n" : "");
	return *text ? VB_APPENDED : VB_NO_FILE;
}

/* configuration is verbena_file for what the kernel was built with: UCX looks there whether it has dma-bufs of
 * GPUs. */
static enum vb_file configuration(const char *release, char *text)
{
	struct utsname kernel;
	if (vb_hides("dmabuf") || !vb_has_gpus() || uname(&kernel) || strcmp(release, kernel.release))
		return VB_NO_FILE;
	strcpy(text, "CONFIG_PCI_P2PDMA=y\nCONFIG_DMABUF_MOVE_NOTIFY=y\n");
	return VB_APPENDED;
}

PUBLIC enum vb_file verbena_file(const char *path, char *text)
{
	if (!strcmp(path, "/proc/kallsyms"))
		return symbols(text);
	if (!strncmp(path, CONFIGURATION, strlen(CONFIGURATION)))
		return configuration(path + strlen(CONFIGURATION), text);
	enum vb_file gpus = vb_gpu_file(path, text);
	if (gpus)
		return gpus;
	char name[IBV_SYSFS_NAME_MAX];
	bool node = !strncmp(path, NODES, strlen(NODES)), verbs = !strncmp(path, VERBS_CLASS, strlen(VERBS_CLASS));
	if (!node && !verbs && strncmp(path, CLASS, strlen(CLASS)))
		return vb_peer_file(path, text);
	path += strlen(node ? NODES : verbs ? VERBS_CLASS : CLASS);
	size_t n = strcspn(path, "/");
	if (n >= sizeof name)
		return VB_NO_FILE;
	memcpy(name, path, n);
	name[n] = 0;
	struct vb_device *d = vb_find_device(name, node || verbs);
	const char *rest = path + n + (path[n] == '/');
	if (!d)
		return VB_NO_FILE;
	if (node)
		return *rest ? VB_NO_FILE : VB_CHAR_DEVICE;
	if (!verbs)
		return of_device(d, rest, text);
	if (strcmp(rest, "ibdev"))
		return *rest ? VB_NO_FILE : VB_DIRECTORY;
	snprintf(text, VB_FILE_ROOM, "%s\n", d->pub.name);
	return VB_TEXT;
}

PUBLIC const char *ibv_get_sysfs_path(void) { return "/sys"; }

/* read_file reads a file of ours or the kernel's, and returns how many bytes, or -1. */
static ssize_t read_file(const char *path, char *buf, size_t size)
{
	char text[VB_FILE_ROOM];
	if (verbena_file(path, text) == VB_TEXT) {
		size_t n = strlen(text);
		memcpy(buf, text, n < size ? n : size);
		return (ssize_t)(n < size ? n : size);
	}
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t n = read(fd, buf, size);
	close(fd);
	return n;
}

PUBLIC int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
	char path[512];
	vb_patch_librdmacm(NULL);
	if (!dir || !file || !buf || !size || (size_t)snprintf(path, sizeof path, "%s/%s", dir, file) >= sizeof path)
		return -1;
	ssize_t n = read_file(path, buf, size);
	if (n <= 0)
		return -1;
	if (buf[n - 1] == '\n')
		buf[--n] = 0;
	else if ((size_t)n < size)
		buf[n] = 0;
	else
		return -1;
	return (int)n;
}
