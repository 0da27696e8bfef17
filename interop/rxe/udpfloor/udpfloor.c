/* Measures the kernel's UDP alone, between two processes that spin: no device that is part
 * of a process can answer faster.
 *
 *	udpfloor pong OWN PEER	answers until nothing has come for 2 seconds
 *	udpfloor ping OWN PEER	sends and waits, and prints half the median round trip in µs
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
	PORT = 4792,
	BYTES = 52, /* as in an 8-byte WRITE: headers, payload, checksum */
	TRIPS = 5000,
	PAUSE = 2,
	LIMIT = 30, /* seconds */
};

static int fd;
static char packet[BYTES];

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void give_up(const char *what)
{
	perror(what);
	exit(1);
}

static struct sockaddr_in address(const char *s)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	if (inet_pton(AF_INET, s, &a.sin_addr) != 1)
		give_up(s);
	return a;
}

/* spin reads until a packet comes, and reports whether one has come in time. A peer that is
 * not up yet refuses packets. */
static int spin(int seconds)
{
	double end = now() + seconds * 1e6;
	for (unsigned n = 1; read(fd, packet, BYTES) < 0; n++) {
		if (errno != EAGAIN && errno != ECONNREFUSED)
			give_up("read");
		if (!(n % 1024) && now() > end)
			return 0;
	}
	return 1;
}

static int by_size(const void *a, const void *b)
{
	double d = *(const double *)a - *(const double *)b;
	return (d > 0) - (d < 0);
}

static void ping(void)
{
	static double took[TRIPS];
	double deadline = now() + LIMIT * 1e6;
	do {
		if (now() > deadline) {
			fputs("no answer from the other side\n", stderr);
			exit(1);
		}
		(void)!write(fd, packet, BYTES); /* the peer may not be up yet */
	} while (!spin(PAUSE));
	for (int i = 0; i < TRIPS; i++) {
		double start = now();
		if (write(fd, packet, BYTES) < 0)
			give_up("write");
		if (!spin(LIMIT)) {
			fputs("no answer\n", stderr);
			exit(1);
		}
		took[i] = now() - start;
	}
	qsort(took, TRIPS, sizeof *took, by_size);
	printf("%.3f\n", took[TRIPS / 2] / 2);
}

static void pong(void)
{
	int came = spin(LIMIT);
	if (!came) {
		fputs("nothing came\n", stderr);
		exit(1);
	}
	for (; came; came = spin(PAUSE))
		if (write(fd, packet, BYTES) < 0 && errno != ECONNREFUSED)
			give_up("write");
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "usage: %s ping|pong OWN PEER\n", argv[0]);
		return 2;
	}
	struct sockaddr_in own = address(argv[2]), peer = address(argv[3]);
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, (void *)&own, sizeof own) || connect(fd, (void *)&peer, sizeof peer))
		give_up("socket");
	if (!strcmp(argv[1], "ping"))
		ping();
	else
		pong();
	return 0;
}
