/*
 * PeerDirect clients: include/verbena/peer_mem.h has their interface.
 *
 *  1. A program registers a client, or VERBENA_PEER_MEM names shared objects. Those are loaded
 *     before the first region is registered, and before a file is looked for that shows them.
 *  2. The backend is given each client, and calls it.
 *  3. A child of fork() gets a backend of its own, which is given the clients, too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../files/files.h"
#include "front.h"

#define PEERS "/sys/kernel/mm/memory_peers"

struct peer {
	struct verbena_peer_memory_client client;
	bool invalidates;
	struct backend *backend; /* that has it */
	uint64_t handle;
	struct peer *next;
};

/* Guards what follows. It is recursive: a shared object registers its clients while the list is
 * locked. No client's operation is called while it is held. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct peer *peers;
static bool loaded;		/* VERBENA_PEER_MEM was read */
static struct backend *served; /* the backend that has all clients; also read without the lock */

static void after_fork_in_child(void)
{
	static const pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
	lock = fresh;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* known reports whether a registration is in the list, which is locked. */
static bool known(const struct peer *p)
{
	for (struct peer *q = peers; q; q = q->next)
		if (q == p)
			return true;
	return false;
}

static int invalidate(void *registration, uint64_t core_context)
{
	struct peer *p = registration;
	pthread_mutex_lock(&lock);
	bool ok = known(p) && !atomic_load(&p->backend->dead);
	struct backend *b = ok ? p->backend : NULL;
	uint64_t h = ok ? p->handle : 0;
	pthread_mutex_unlock(&lock);
	return b ? (int)b->vbe_peer_invalidate(h, core_context) : -EINVAL;
}

/* hand gives a client to a backend. It returns 0 or an errno. */
static int hand(struct backend *b, struct peer *p)
{
	int64_t h = b->vbe_peer_register(&p->client, p->invalidates);
	if (h < 0)
		return (int)-h;
	p->backend = b;
	p->handle = (uint64_t)h;
	return 0;
}

PUBLIC void *verbena_register_peer_memory_client(const struct verbena_peer_memory_client *client,
						 verbena_invalidate_peer_memory **to)
{
	struct backend *b = vb_backend();
	if (!b)
		return NULL;
	struct peer *p = client ? calloc(1, sizeof *p) : NULL;
	if (!p)
		return vb_fail(client ? ENOMEM : EINVAL);
	p->client = *client;
	p->invalidates = to;
	pthread_mutex_lock(&lock);
	vb_peers(b); /* those that were registered earlier come first */
	int err = hand(b, p);
	if (!err) {
		struct peer **end = &peers;
		while (*end)
			end = &(*end)->next;
		*end = p;
	}
	pthread_mutex_unlock(&lock);
	if (err) {
		free(p);
		return vb_fail(err);
	}
	if (to)
		*to = invalidate;
	return p;
}

PUBLIC int verbena_unregister_peer_memory_client(void *registration)
{
	struct peer *p = registration;
	pthread_mutex_lock(&lock);
	bool ok = known(p);
	if (ok)
		for (struct peer **at = &peers; *at; at = &(*at)->next)
			if (*at == p) {
				*at = p->next;
				break;
			}
	pthread_mutex_unlock(&lock);
	if (!ok)
		return vb_num(-EINVAL);
	int64_t r = atomic_load(&p->backend->dead) ? 0 : p->backend->vbe_peer_unregister(p->handle);
	if (r < 0)
		return vb_num(r); /* the backend may still call it: its memory stays */
	free(p);
	return 0;
}

/* load loads one shared object, which stays loaded. */
static void load(const char *path)
{
	static const struct verbena_peer_mem_core core = {sizeof core, verbena_register_peer_memory_client,
							  verbena_unregister_peer_memory_client};
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	const char *why = lib ? NULL : dlerror();
	verbena_peer_mem_init_function *init = NULL;
	if (lib && !(init = (verbena_peer_mem_init_function *)dlsym(lib, "verbena_peer_mem_init")))
		why = "it has no function verbena_peer_mem_init";
	int err = init ? init(&core) : 0;
	if (err)
		why = strerror(err < 0 ? -err : err);
	if (why)
		fprintf(stderr, "libibverbs (Verbena): VERBENA_PEER_MEM: %s: %s\n", path, why);
}

/* load_all loads what VERBENA_PEER_MEM names. */
static void load_all(void)
{
	const char *set = vb_setting("VERBENA_PEER_MEM");
	char *list = set && *set ? strdup(set) : NULL, *rest = list;
	for (const char *path; (path = strsep(&rest, ":"));)
		if (*path)
			load(path);
	free(list);
}

void vb_peers(struct backend *b)
{
	if (__atomic_load_n(&served, __ATOMIC_ACQUIRE) == b)
		return;
	int err = errno;
	pthread_mutex_lock(&lock);
	if (served != b) {
		__atomic_store_n(&served, b, __ATOMIC_RELEASE); /* also while load_all registers clients */
		for (struct peer *p = peers; p; p = p->next)
			if (p->backend != b)
				hand(b, p); /* it was taken before */
		if (!loaded) {
			loaded = true;
			load_all();
		}
	}
	pthread_mutex_unlock(&lock);
	errno = err;
}

/* --- what programs see of them --- */

/* present reports whether there are clients, or names of some. */
static bool present(void)
{
	const char *set = vb_setting("VERBENA_PEER_MEM");
	if (!__atomic_load_n(&peers, __ATOMIC_ACQUIRE) && !(set && *set))
		return false;
	struct backend *b = vb_backend();
	if (b)
		vb_peers(b);
	return __atomic_load_n(&peers, __ATOMIC_ACQUIRE);
}

bool vb_has_peers(void) { return present(); }

/* counter writes the text of one of a client's counters, and reports whether there is such a file. */
static bool counter(struct peer *p, const char *name, char *text)
{
	static const char *const names[VBE_PEER_STATS] = {
		"num_alloc_mrs", "num_dealloc_mrs", "num_reg_pages", "num_dereg_pages",
		"num_reg_bytes", "num_dereg_bytes", "num_free_callbacks"};
	uint64_t values[VBE_PEER_STATS];
	for (int i = 0; i < VBE_PEER_STATS; i++)
		if (!strcmp(name, names[i]) && p->backend->vbe_peer_stats(p->handle, values) >= 0) {
			snprintf(text, VB_FILE_ROOM, "%llu\n", (unsigned long long)values[i]);
			return true;
		}
	return false;
}

enum vb_file vb_peer_file(const char *path, char *text)
{
	size_t n = strlen(PEERS);
	if (strncmp(path, PEERS, n) || (path[n] && path[n] != '/') || !present())
		return VB_NO_FILE;
	const char *name = path + n + (path[n] == '/');
	if (!*name)
		return VB_DIRECTORY;
	enum vb_file what = VB_NO_FILE;
	pthread_mutex_lock(&lock);
	for (struct peer *p = peers; p && what == VB_NO_FILE; p = p->next) {
		size_t len = strnlen(p->client.name, sizeof p->client.name);
		if (strncmp(name, p->client.name, len) || (name[len] && name[len] != '/'))
			continue;
		const char *file = name + len + (name[len] == '/');
		if (!*file)
			what = VB_DIRECTORY;
		else if (!strcmp(file, "version")) {
			snprintf(text, VB_FILE_ROOM, "%.*s\n", VERBENA_PEER_MEM_VERSION_MAX, p->client.version);
			what = VB_TEXT;
		} else if (counter(p, file, text))
			what = VB_TEXT;
	}
	pthread_mutex_unlock(&lock);
	return what;
}
