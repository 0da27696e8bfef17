/*
 * Devices: the list, opening and closing, attributes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "front.h"
#include "ucma.h"

enum { MAX_DEVICES = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct vb_device *known[MAX_DEVICES];		 /* all that were ever listed: programs keep pointers */
static int num_known;
static struct vb_context *opened; /* a list, by next_open */

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void)
{
	opened = NULL; /* these contexts are the parent's */
	pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* --- the list --- */

static struct vb_device *device_locked(const struct vbe_device *d)
{
	for (int i = 0; i < num_known; i++)
		if (!strcmp(known[i]->pub.name, d->name) && known[i]->guid == d->guid)
			return known[i];
	struct vb_device *n = num_known < MAX_DEVICES ? calloc(1, sizeof *n) : NULL;
	if (!n)
		return NULL;
	n->pub.node_type = IBV_NODE_CA;
	n->pub.transport_type = IBV_TRANSPORT_IB;
	n->index = num_known;
	n->guid = d->guid;
	snprintf(n->interface, sizeof n->interface, "%s", d->interface);
	snprintf(n->pub.name, sizeof n->pub.name, "%.*s", (int)sizeof n->pub.name - 1, d->name);
	snprintf(n->pub.dev_name, sizeof n->pub.dev_name, "uverbs%d", n->index);
	snprintf(n->pub.dev_path, sizeof n->pub.dev_path, "/sys/class/infiniband_verbs/uverbs%d", n->index);
	snprintf(n->pub.ibdev_path, sizeof n->pub.ibdev_path, "/sys/class/infiniband/%s", n->pub.name);
	known[num_known++] = n;
	return n;
}

struct vb_device *vb_find_device(const char *name, bool by_node)
{
	struct vb_device *found = NULL;
	pthread_mutex_lock(&lock);
	for (int i = num_known - 1; i >= 0 && !found; i--) /* the latest one of that name */
		if (!strcmp(by_node ? known[i]->pub.dev_name : known[i]->pub.name, name))
			found = known[i];
	pthread_mutex_unlock(&lock);
	return found;
}

PUBLIC struct ibv_device **ibv_get_device_list(int *num_devices)
{
	if (num_devices)
		*num_devices = 0;
	int err = vb_patch_librdmacm(__builtin_return_address(0));
	if (err)
		return vb_fail(err);
	struct backend *b = vb_backend();
	if (!b)
		return NULL;
	struct vbe_device *found = calloc(MAX_DEVICES, sizeof *found);
	struct ibv_device **list = calloc(MAX_DEVICES + 1, sizeof *list);
	int64_t n = found && list ? b->vbe_list(found, MAX_DEVICES) : -ENOMEM;
	if (n < 0) {
		free(found);
		free(list);
		return vb_fail((int)-n);
	}
	int k = 0;
	pthread_mutex_lock(&lock);
	for (int64_t i = 0; i < n; i++) {
		struct vb_device *d = device_locked(&found[i]);
		if (d)
			list[k++] = &d->pub;
	}
	pthread_mutex_unlock(&lock);
	free(found);
	if (num_devices)
		*num_devices = k;
	return list;
}

PUBLIC void ibv_free_device_list(struct ibv_device **list) { free(list); }

PUBLIC const char *ibv_get_device_name(struct ibv_device *device) { return device ? device->name : vb_fail(EINVAL); }

PUBLIC __be64 ibv_get_device_guid(struct ibv_device *device)
{
	return device ? htobe64(((struct vb_device *)device)->guid) : 0;
}

PUBLIC int ibv_get_device_index(struct ibv_device *device)
{
	return device ? ((struct vb_device *)device)->index : -1;
}

/* --- opening --- */

/* make_cmd_fd makes a file with the name of a context, for ibv_import_device: cmd_fd has
 * no other use. It returns the descriptor, or -1 with errno. */
static int make_cmd_fd(struct vb_context *c, struct backend *b, int64_t h)
{
	int64_t r = b->vbe_name((uint64_t)h, c->name, sizeof c->name);
	if (r < 0) {
		errno = (int)-r;
		return -1;
	}
	int fd = memfd_create("verbena", MFD_CLOEXEC);
	if (fd >= 0 && dprintf(fd, "verbena %s\n", c->name) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

static void enter_locked(struct vb_context *c)
{
	c->opens = 1;
	c->next_open = opened;
	opened = c;
}

/* start completes a context. h is the backend's handle, or its negative errno. fd is the
 * descriptor by which a context of another process is imported, and becomes its cmd_fd. */
static struct ibv_context *start(struct vb_context *c, int64_t h, struct ibv_device *device, int fd)
{
	struct backend *b = c->h.backend;
	if (h < 0) {
		vb_free(CONTEXT, &c->h);
		return vb_fail((int)-h);
	}
	c->h.handle = (uint64_t)h;
	struct ibv_context *pub = &c->v.context;
	pub->device = device;
	pub->num_comp_vectors = 1;
	pthread_mutex_init(&pub->mutex, NULL);
	pub->cmd_fd = c->foreign ? -1 : make_cmd_fd(c, b, h);
	pub->async_fd = -1;
	int err = !c->foreign && pub->cmd_fd < 0 ? errno : 0;
	pthread_mutex_lock(&lock);
	enter_locked(c); /* from here on ibv_import_device compares its name */
	pthread_mutex_unlock(&lock);
	if (!err)
		err = vb_start_events(c);
	if (!err)
		err = (int)-b->vbe_query_device(c->h.handle, &c->attr);
	if (err) {
		ibv_close_device(pub);
		return vb_fail(err);
	}
	if (c->foreign)
		pub->cmd_fd = fd;
	vb_set_ops(c);
	return pub;
}

PUBLIC struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct backend *b = vb_backend();
	if (!b)
		return NULL;
	if (!device)
		return vb_fail(EINVAL);
	struct vb_context *c = vb_new(CONTEXT, b);
	if (!c)
		return NULL;
	return start(c, b->vbe_open(device->name, (uintptr_t)c), device, -1);
}

/* open_again opens the device of a context of the parent process in this child of fork().
 * The context's cmd_fd then names the child's context, unless it is imported. */
static int64_t open_again(struct vb_context *c, struct backend *b)
{
	struct vbe_device d;
	if (c->foreign)
		return b->vbe_import(c->name, (uintptr_t)c, &d);
	int64_t h = b->vbe_open(c->v.context.device->name, (uintptr_t)c);
	int fd = h < 0 ? -1 : make_cmd_fd(c, b, h);
	if (h < 0)
		return h;
	int err = fd < 0 || dup3(fd, c->v.context.cmd_fd, O_CLOEXEC) < 0 ? errno : 0;
	if (fd >= 0)
		close(fd);
	if (err)
		b->vbe_close((uint64_t)h);
	return err ? -err : h;
}

struct vb_context *vb_revive_context(struct vb_context *c)
{
	struct backend *b = vb_is(&c->h, CONTEXT) ? vb_backend() : NULL;
	if (!b)
		return NULL;
	pthread_mutex_lock(&lock);
	if (c->h.backend != b) {
		int64_t h = open_again(c, b);
		int err = h < 0 ? (int)-h : vb_renew_events(c);
		if (err) {
			if (h > 0)
				b->vbe_close((uint64_t)h);
			pthread_mutex_unlock(&lock);
			return vb_fail(err);
		}
		c->h.handle = (uint64_t)h;
		c->h.backend = b;
		enter_locked(c);
	}
	pthread_mutex_unlock(&lock);
	return c;
}

PUBLIC int ibv_close_device(struct ibv_context *context)
{
	if (!context || !vb_is(&to_context(context)->h, CONTEXT))
		return vb_num(-EINVAL);
	struct vb_context *c = to_context(context);
	bool ours = vb_usable(&c->h, CONTEXT);
	pthread_mutex_lock(&lock);
	bool last = --c->opens == 0;
	int fd = last ? context->cmd_fd : c->imported[c->opens - 1];
	for (struct vb_context **p = &opened; last && *p; p = &(*p)->next_open)
		if (*p == c) {
			*p = c->next_open;
			break;
		}
	pthread_mutex_unlock(&lock);
	if (fd >= 0)
		close(fd);
	if (!last)
		return 0;
	if (ours)
		c->h.backend->vbe_close(c->h.handle);
	vb_end_events(c);
	free(c->imported);
	vb_free(CONTEXT, &c->h);
	return 0;
}

/* import_foreign makes a context for imports from another process's context of that name. */
static struct ibv_context *import_foreign(char *name, int cmd_fd)
{
	struct backend *b = vb_backend();
	struct vb_context *c = b ? vb_new(CONTEXT, b) : NULL;
	struct vbe_device found;
	if (!c)
		return NULL;
	c->foreign = true;
	memcpy(c->name, name, sizeof c->name);
	int64_t h = b->vbe_import(name, (uintptr_t)c, &found);
	pthread_mutex_lock(&lock);
	struct vb_device *d = h < 0 ? NULL : device_locked(&found);
	pthread_mutex_unlock(&lock);
	if (h > 0 && !d) {
		b->vbe_close((uint64_t)h);
		h = -ENOMEM;
	}
	return start(c, h, d ? &d->pub : NULL, cmd_fd);
}

PUBLIC struct ibv_context *ibv_import_device(int cmd_fd)
{
	char text[VBE_NAME + 16] = "", name[VBE_NAME] = "";
	if (pread(cmd_fd, text, sizeof text - 1, 0) < 0)
		return vb_fail(errno == EBADF ? EBADF : EINVAL);
	if (sscanf(text, "verbena %255s", name) != 1)
		return vb_fail(EINVAL);
	pthread_mutex_lock(&lock);
	struct vb_context *c = opened;
	while (c && (c->foreign || strcmp(c->name, name)))
		c = c->next_open;
	int *fds = c ? realloc(c->imported, c->opens * sizeof *fds) : NULL;
	if (fds) {
		fds[c->opens++ - 1] = cmd_fd; /* ibv_close_device closes it */
		c->imported = fds;
	}
	pthread_mutex_unlock(&lock);
	if (!c)
		return import_foreign(name, cmd_fd);
	return fds ? &c->v.context : vb_fail(ENOMEM);
}

/* --- attributes --- */

static void fill_device_attr(const struct vbe_device_attr *a, struct ibv_device_attr *to)
{
	memset(to, 0, sizeof *to);
	memcpy(to->fw_ver, a->fw, sizeof to->fw_ver);
	to->node_guid = htobe64(a->node_guid);
	to->sys_image_guid = htobe64(a->image_guid);
	to->max_mr_size = a->max_mr_size;
	to->page_size_cap = a->page_size_cap;
	to->vendor_id = a->vendor_id;
	to->vendor_part_id = a->vendor_part_id;
	to->hw_ver = a->hw_ver;
	to->max_qp = a->max_qp;
	to->max_qp_wr = a->max_qp_wr;
	to->device_cap_flags = a->caps;
	to->max_sge = a->max_sge;
	to->max_sge_rd = a->max_sge_rd;
	to->max_cq = a->max_cq;
	to->max_cqe = a->max_cqe;
	to->max_mr = a->max_mr;
	to->max_pd = a->max_pd;
	to->max_qp_rd_atom = a->max_rd_atom;
	to->max_res_rd_atom = a->max_res_rd_atom;
	to->max_qp_init_rd_atom = a->max_init_rd_atom;
	to->atomic_cap = (enum ibv_atomic_cap)a->atomic_cap;
	to->max_mw = a->max_mw;
	to->max_mcast_grp = a->max_mcast_grp;
	to->max_mcast_qp_attach = a->max_mcast_qp_attach;
	to->max_total_mcast_qp_attach = a->max_total_mcast_qp_attach;
	to->max_ah = a->max_ah;
	to->max_srq = a->max_srq;
	to->max_srq_wr = a->max_srq_wr;
	to->max_srq_sge = a->max_srq_sge;
	to->max_pkeys = (uint16_t)a->max_pkeys;
	to->local_ca_ack_delay = (uint8_t)a->ack_delay;
	to->phys_port_cnt = (uint8_t)a->ports;
}

PUBLIC int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	struct vb_context *c = live_context(context);
	if (!c || !attr)
		return vb_num(-EINVAL);
	fill_device_attr(&c->attr, attr);
	return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	struct vb_context *c = live_context(context);
	if (!c || !attr || size < sizeof attr->orig_attr || (input && input->comp_mask))
		return vb_num(-EINVAL);
	const struct vbe_device_attr *a = &c->attr;
	struct ibv_device_attr_ex x;
	memset(&x, 0, sizeof x);
	fill_device_attr(a, &x.orig_attr);
	x.odp_caps.general_caps = a->odp_general;
	x.odp_caps.per_transport_caps.rc_odp_caps = a->odp_rc;
	x.odp_caps.per_transport_caps.uc_odp_caps = a->odp_uc;
	x.odp_caps.per_transport_caps.ud_odp_caps = a->odp_ud;
	x.xrc_odp_caps = a->odp_xrc;
	x.completion_timestamp_mask = UINT64_MAX;
	x.hca_core_clock = 1000000; /* kHz: timestamps are nanoseconds */
	x.device_cap_flags_ex = a->caps | (a->flush ? (1ULL << 38 | 1ULL << 39) : 0) | (a->atomic_write ? 1ULL << 40 : 0);
	x.max_dm_size = a->max_dm_size;
	x.phys_port_cnt_ex = (uint32_t)a->ports;
	memset(attr, 0, size); /* a newer program's structure may be longer */
	memcpy(attr, &x, size < sizeof x ? size : sizeof x);
	return 0;
}

/* One lane of 25 Gb/s: the tools print 25 Gb/s. */
enum { WIDTH_1X = 1, SPEED_25G = 32, PHYS_LINK_UP = 5, PHYS_DISABLED = 3 };

static int fill_port_attr(struct vb_context *c, uint8_t port, struct ibv_port_attr *to, size_t size)
{
	struct vbe_port_attr a;
	struct ibv_port_attr x;
	int64_t r = c->h.backend->vbe_query_port(c->h.handle, port, &a);
	if (r < 0)
		return vb_num(r);
	memset(&x, 0, sizeof x);
	x.state = (enum ibv_port_state)a.state;
	x.max_mtu = (enum ibv_mtu)a.max_mtu;
	x.active_mtu = (enum ibv_mtu)a.active_mtu;
	x.gid_tbl_len = a.gids;
	x.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
	x.max_msg_sz = a.max_msg;
	x.bad_pkey_cntr = a.bad_pkey;
	x.qkey_viol_cntr = a.bad_qkey;
	x.pkey_tbl_len = (uint16_t)a.pkeys;
	x.max_vl_num = 1;
	x.active_width = WIDTH_1X;
	x.active_speed = SPEED_25G;
	x.phys_state = a.state == IBV_PORT_ACTIVE ? PHYS_LINK_UP : PHYS_DISABLED;
	x.link_layer = IBV_LINK_LAYER_ETHERNET;
	x.flags = IBV_QPF_GRH_REQUIRED;
	memset(to, 0, size);
	memcpy(to, &x, size < sizeof x ? size : sizeof x);
	return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	struct vb_context *c = live_context(context);
	return c && attr ? fill_port_attr(c, port, attr, size) : vb_num(-EINVAL);
}

/* Only programs so old that their structure ends before flags call this symbol. */
PUBLIC int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return query_port(context, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, flags));
}

/* --- GIDs and P_Keys --- */

/* gids returns how many there are, or a negative errno. */
static int64_t gids(struct ibv_context *context, uint32_t port, union ibv_gid all[VB_MAX_GIDS])
{
	struct vb_context *c = live_context(context);
	if (!c || port != 1)
		return -EINVAL;
	return c->h.backend->vbe_gids(c->h.handle, all[0].raw, VB_MAX_GIDS);
}

PUBLIC int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	union ibv_gid all[VB_MAX_GIDS];
	int64_t n = gids(context, port, all);
	if (n < 0 || index < 0 || index >= n || !gid) {
		errno = EINVAL;
		return -1;
	}
	*gid = all[index];
	return 0;
}

static void fill_entry(struct ibv_context *context, const union ibv_gid *gid, uint32_t index, struct ibv_gid_entry *to)
{
	const struct vb_device *d = (struct vb_device *)context->device;
	memset(to, 0, sizeof *to);
	to->gid = *gid;
	to->gid_index = index;
	to->port_num = 1;
	to->gid_type = IBV_GID_TYPE_ROCE_V2;
	to->ndev_ifindex = if_nametoindex(d->interface);
}

PUBLIC int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
			     uint32_t flags, size_t size)
{
	union ibv_gid all[VB_MAX_GIDS];
	if (flags || !entry || size > sizeof *entry)
		return vb_num(flags ? -EOPNOTSUPP : -EINVAL);
	int64_t n = gids(context, port, all);
	if (n < 0)
		return vb_num(n);
	if (index >= n)
		return vb_num(-EINVAL);
	struct ibv_gid_entry e;
	fill_entry(context, &all[index], index, &e);
	memcpy(entry, &e, size);
	return 0;
}

PUBLIC ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max,
				    uint32_t flags, size_t size)
{
	union ibv_gid all[VB_MAX_GIDS];
	if (flags || !entries || size != sizeof *entries)
		return flags ? -EOPNOTSUPP : -EINVAL;
	int64_t n = gids(context, 1, all);
	if (n < 0)
		return n;
	if ((size_t)n > max)
		return -EINVAL;
	for (int64_t i = 0; i < n; i++)
		fill_entry(context, &all[i], (uint32_t)i, &entries[i]);
	return n;
}

/* ibv_query_gid_type answers with the numbers of sysfs: 0 for RoCE v1, 1 for v2. */
static int query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type)
{
	union ibv_gid all[VB_MAX_GIDS];
	int64_t n = gids(context, port, all);
	if (n < 0 || index >= n || !type) {
		errno = EINVAL;
		return -1;
	}
	*type = 1;
	return 0;
}

/* It is private to rdma-core, which versions such symbols by release: one definition for
 * each release that programs may be linked to. */
#define GID_TYPE(release)                                                                                              \
	PUBLIC int ibv_query_gid_type_##release(struct ibv_context *context, uint8_t port, unsigned int index,         \
						unsigned int *type)                                                    \
	{                                                                                                              \
		return query_gid_type(context, port, index, type);                                                     \
	}                                                                                                              \
	__asm__(".symver ibv_query_gid_type_" #release ", ibv_query_gid_type@IBVERBS_PRIVATE_" #release);
GID_TYPE(33)
GID_TYPE(34)
GID_TYPE(57)
GID_TYPE(58)
GID_TYPE(59)
GID_TYPE(60)
GID_TYPE(61)
GID_TYPE(62)
GID_TYPE(63)
GID_TYPE(64)
GID_TYPE(65)
GID_TYPE(66)

enum { DEFAULT_PKEY = 0xffff };

PUBLIC int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	if (!live_context(context) || port != 1 || index != 0 || !pkey) {
		errno = EINVAL;
		return -1;
	}
	*pkey = htons(DEFAULT_PKEY);
	return 0;
}

PUBLIC int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	if (!live_context(context) || port != 1 || (ntohs(pkey) & 0x7fff) != (DEFAULT_PKEY & 0x7fff)) {
		errno = EINVAL;
		return -1;
	}
	return 0;
}

/* In units of 100 Mb/s: 25 Gb/s, as ibv_query_port reports. */
PUBLIC int ibv_query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *speed)
{
	if (!live_context(context) || port != 1 || !speed)
		return vb_num(-EINVAL);
	*speed = 250;
	return 0;
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	if (!live_context(context) || !values)
		return vb_num(-EINVAL);
	uint32_t want = values->comp_mask;
	values->comp_mask = 0;
	if (want & IBV_VALUES_MASK_RAW_CLOCK) {
		clock_gettime(CLOCK_MONOTONIC, &values->raw_clock);
		values->comp_mask |= IBV_VALUES_MASK_RAW_CLOCK;
	}
	return 0;
}

/* Very old programs call the compatibility entries of the table. */
static int compat_query_device(struct ibv_context *c, struct ibv_device_attr *a) { return ibv_query_device(c, a); }

void vb_set_ops(struct vb_context *c)
{
	struct verbs_context *v = &c->v;
	struct ibv_context_ops *o = &v->context.ops;
	o->_compat_query_device = compat_query_device;
	o->_compat_query_port = ibv_query_port;
	o->alloc_mw = vb_alloc_mw;
	o->bind_mw = vb_bind_mw;
	o->dealloc_mw = vb_dealloc_mw;
	o->poll_cq = vb_poll_cq;
	o->req_notify_cq = vb_req_notify_cq;
	o->post_srq_recv = vb_post_srq_recv;
	o->post_send = vb_post_send;
	o->post_recv = vb_post_recv;

	v->sz = sizeof *v;
	v->context.abi_compat = (void *)UINTPTR_MAX; /* there is a verbs_context around it */
	v->query_port = query_port;
	v->query_device_ex = query_device_ex;
	v->query_rt_values = query_rt_values;
	v->advise_mr = vb_advise_mr;
	v->alloc_null_mr = vb_alloc_null_mr;
	v->alloc_dm = vb_alloc_dm;
	v->free_dm = vb_free_dm;
	v->reg_dm_mr = vb_reg_dm_mr;
	v->alloc_parent_domain = vb_alloc_parent_domain;
	v->alloc_td = vb_alloc_td;
	v->dealloc_td = vb_dealloc_td;
	v->create_cq_ex = vb_create_cq_ex;
	v->modify_cq = vb_modify_cq;
	v->create_qp_ex = vb_create_qp_ex;
	v->open_qp = vb_open_qp;
	v->create_srq_ex = vb_create_srq_ex;
	v->get_srq_num = vb_get_srq_num;
	v->open_xrcd = vb_open_xrcd;
	v->close_xrcd = vb_close_xrcd;
}
