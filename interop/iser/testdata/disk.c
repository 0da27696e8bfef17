/*
 * disk URL INITIATOR SEED COMMANDS writes, reads and compares a disk by libiscsi.
 *
 *  1. All blocks are written.
 *  2. COMMANDS times, a random extent is written with new data, or read and compared. Many
 *     commands are under way at a time, no two of them for the same block if one writes.
 *  3. All blocks are read and compared, written for the last time, and read again.
 *
 * The words of block n, of 8 bytes, are mix(SEED + version + n * 64 + i), of which the last
 * version is LAST: so another program can check the disk. It prints "ok" at its end.
 */
#include <errno.h>
#include <inttypes.h>
#include <iscsi/iscsi.h>
#include <iscsi/scsi-lowlevel.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 512, WORDS = BLOCK / 8, MOST = 512, DEPTH = 24, LIMIT_MS = 120000 };
#define LAST ((uint64_t)1 << 63)

static struct iscsi_context *iscsi;
static int lun, flying;
static uint64_t seed, state, blocks, versions, commands, written, compared;
static uint64_t *version_of; /* of each block */
static uint16_t *readers;    /* of each block: commands under way */
static bool *written_now;    /* of each block */

static void die(const char *what)
{
	printf("%s: %s\n", what, iscsi ? iscsi_get_error(iscsi) : "");
	exit(1);
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t below(uint64_t n) { return mix(state++) % n; }

static uint64_t word(uint64_t block, uint64_t version, int i) { return mix(seed + version + block * WORDS + i); }

struct extent {
	uint64_t first, count;
	uint64_t *data; /* what is written; NULL: it is read */
};

/* origin names the block and the version of a word that is wrong, if it is one that was written. */
static void origin(uint64_t got)
{
	for (uint64_t b = 0; b < blocks; b++)
		for (uint64_t v = 0; v <= versions; v++)
			for (int i = 0; i < WORDS; i++)
				if (got == word(b, v << 40, i)) {
					printf("it is word %d of block %" PRIu64 " in version %" PRIu64 "\n", i, b, v);
					return;
				}
}

static void done(struct iscsi_context *ctx, int status, void *command, void *arg)
{
	(void)ctx;
	struct extent *e = arg;
	struct scsi_task *task = command;
	if (status != SCSI_STATUS_GOOD)
		die(e->data ? "write" : "read");
	if (!e->data && task->datain.size != (int)e->count * BLOCK) {
		printf("read %d bytes of %" PRIu64 " blocks\n", task->datain.size, e->count);
		exit(1);
	}
	for (uint64_t n = 0; n < e->count; n++) {
		uint64_t b = e->first + n;
		if (e->data) {
			written_now[b] = false;
			continue;
		}
		readers[b]--;
		for (int i = 0; i < WORDS; i++) {
			uint64_t got;
			memcpy(&got, task->datain.data + n * BLOCK + i * 8, 8);
			if (got != word(b, version_of[b], i)) {
				printf("block %" PRIu64 " word %d is %016" PRIx64 ", not %016" PRIx64 " of version %" PRIu64 "; read with %" PRIu64 " from %" PRIu64 "\n",
				       b, i, got, word(b, version_of[b], i), version_of[b] >> 40, e->count, e->first);
				origin(got);
				exit(1);
			}
		}
	}
	*(e->data ? &written : &compared) += e->count;
	scsi_free_scsi_task(task);
	free(e->data);
	free(e);
	flying--;
}

static void serve(void)
{
	struct pollfd p = {.fd = iscsi_get_fd(iscsi), .events = iscsi_which_events(iscsi)};
	int n = poll(&p, 1, LIMIT_MS);
	if (n < 0 && errno != EINTR)
		die("poll");
	if (n == 0)
		die("nothing comes");
	if (n > 0 && iscsi_service(iscsi, p.revents))
		die("iscsi_service");
}

/* start begins a command. It waits for others while there are too many, or those of its blocks. */
static void start(uint64_t first, uint64_t count, bool write, uint64_t version)
{
	for (;;) {
		bool busy = flying >= DEPTH;
		for (uint64_t b = first; b < first + count && !busy; b++)
			busy = written_now[b] || (write && readers[b]);
		if (!busy)
			break;
		serve();
	}
	struct extent *e = calloc(1, sizeof *e);
	e->first = first;
	e->count = count;
	if (write)
		e->data = malloc(count * BLOCK);
	for (uint64_t n = 0; n < count; n++) {
		uint64_t b = first + n;
		if (!write) {
			readers[b]++;
			continue;
		}
		written_now[b] = true;
		version_of[b] = version;
		for (int i = 0; i < WORDS; i++)
			e->data[n * WORDS + i] = word(b, version, i);
	}
	flying++;
	if (!(write ? iscsi_write16_task(iscsi, lun, first, (void *)e->data, count * BLOCK, BLOCK, 0, 0, 0, 0, 0, done, e)
		    : iscsi_read16_task(iscsi, lun, first, count * BLOCK, BLOCK, 0, 0, 0, 0, 0, done, e)))
		die("a command is not taken");
}

static void all(bool write, uint64_t version)
{
	for (uint64_t b = 0, n; b < blocks; b += n) {
		n = 1 + below(MOST);
		if (n > blocks - b)
			n = blocks - b;
		start(b, n, write, version);
	}
	while (flying)
		serve();
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	seed = strtoull(argv[3], NULL, 10);
	commands = strtoull(argv[4], NULL, 10);
	state = ~seed;
	iscsi = iscsi_create_context(argv[2]);
	struct iscsi_url *url = iscsi ? iscsi_parse_full_url(iscsi, argv[1]) : NULL;
	if (!url)
		die("URL");
	lun = url->lun;
	iscsi_set_targetname(iscsi, url->target);
	iscsi_set_session_type(iscsi, ISCSI_SESSION_NORMAL);
	if (iscsi_full_connect_sync(iscsi, url->portal, lun))
		die("login");
	struct scsi_task *task = iscsi_readcapacity16_sync(iscsi, lun);
	struct scsi_readcapacity16 *cap = task && task->status == SCSI_STATUS_GOOD ? scsi_datain_unmarshall(task) : NULL;
	if (!cap || cap->block_length != BLOCK)
		die("capacity");
	blocks = cap->returned_lba + 1;
	scsi_free_scsi_task(task);
	version_of = calloc(blocks, sizeof *version_of);
	readers = calloc(blocks, sizeof *readers);
	written_now = calloc(blocks, sizeof *written_now);
	all(true, 0);
	printf("begun\n");
	while (commands--) {
		uint64_t first = below(blocks), n = 1 + below(MOST);
		if (n > blocks - first)
			n = blocks - first;
		start(first, n, below(2), ++versions << 40);
	}
	while (flying)
		serve();
	all(false, 0);
	all(true, LAST);
	all(false, 0);
	printf("%" PRIu64 " blocks, %" PRIu64 " written, %" PRIu64 " read and compared\n", blocks, written, compared);
	iscsi_logout_sync(iscsi);
	iscsi_destroy_url(url);
	iscsi_destroy_context(iscsi);
	printf("ok\n");
	return 0;
}
