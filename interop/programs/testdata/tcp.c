/*
 * An ordinary client and server of TCP, which know nothing of RDMA: run with rdma-core's
 * librspreload.so, their sockets become rsockets. Each side sends a stream of bytes to the
 * other, of lengths that differ from call to call, and checks all that it receives.
 *
 *   tcp HOW SEED server ADDRESS PORT
 *   tcp HOW SEED client ADDRESS PORT
 *
 *   turns  blocking sockets: the client sends everything, then the server does
 *   poll   sockets that do not block: each side sends and receives when poll says so
 *   echo   the server sends back what it has received, call by call, and blocks; the client
 *          sends and receives when poll says so
 *
 * No socket is used by two threads. In rsockets (rdma-core 44; the source of August 2026 is
 * the same there), a thread that sends and one that receives may wait for ever: one takes the
 * completion that the other waits for, and the other then waits for the next one.
 *
 * SEED chooses the lengths. A program that fails prints why and exits with 1.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TOTAL = 13 * 1000 * 1000 + 7, MOST = 100000 };

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

/* A stream in one direction. Its bytes depend on the sender and on their place. */
struct stream {
	int fd;
	size_t done;
	uint32_t key;	/* of the sender */
	uint64_t random; /* the state of the lengths */
	char buf[MOST];
	size_t have, used; /* in buf: what is yet to be sent is between the two */
};

static char at(const struct stream *s, size_t i) { return (char)((i ^ s->key) * 2654435761u >> 13); }

/* length returns how much the next call may move: from one byte to MOST, small ones as
 * often as large ones. */
static size_t length(struct stream *s)
{
	s->random = s->random * 6364136223846793005u + 1442695040888963407u;
	size_t n = 1 + (s->random >> 33) % (1u << (s->random >> 59) % 17);
	size_t left = TOTAL - s->done - (s->have - s->used);
	if (n > MOST)
		n = MOST;
	return n < left ? n : left;
}

/* give sends some bytes. It reports whether it could. */
static int give(struct stream *s)
{
	if (s->used == s->have) {
		s->used = s->have = 0;
		size_t n = length(s);
		for (size_t i = 0; i < n; i++)
			s->buf[i] = at(s, s->done + i);
		s->have = n;
	}
	ssize_t n = send(s->fd, s->buf + s->used, s->have - s->used, 0);
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return 0;
	if (n <= 0)
		fail("send");
	s->used += (size_t)n;
	s->done += (size_t)n;
	return 1;
}

/* take receives some bytes. It reports whether there were any. */
static int take(struct stream *s)
{
	ssize_t n = recv(s->fd, s->buf, length(s), 0);
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return 0;
	if (n < 0)
		fail("recv");
	if (!n) {
		fprintf(stderr, "the peer has closed the connection after %zu bytes\n", s->done);
		exit(1);
	}
	for (ssize_t i = 0; i < n; i++)
		if (s->buf[i] != at(s, s->done + (size_t)i)) {
			fprintf(stderr, "byte %zu is wrong\n", s->done + (size_t)i);
			exit(1);
		}
	s->done += (size_t)n;
	return 1;
}

static void give_all(struct stream *s)
{
	while (s->done < TOTAL)
		give(s);
}

static void take_all(struct stream *s)
{
	while (s->done < TOTAL)
		take(s);
}

static void in_turns(struct stream *out, struct stream *in, int server)
{
	if (server)
		take_all(in);
	give_all(out);
	if (!server)
		take_all(in);
}

/* echo sends back what comes. What it sends is what the client has sent. */
static void echo(struct stream *in)
{
	while (in->done < TOTAL) {
		size_t before = in->done;
		take(in);
		for (size_t n = in->done - before, sent = 0; sent < n;) {
			ssize_t some = send(in->fd, in->buf + sent, n - sent, 0);
			if (some <= 0)
				fail("send");
			sent += (size_t)some;
		}
	}
}

static void by_poll(struct stream *out, struct stream *in)
{
	if (fcntl(out->fd, F_SETFL, O_NONBLOCK))
		fail("fcntl");
	while (out->done < TOTAL || in->done < TOTAL) {
		struct pollfd p = {.fd = out->fd};
		p.events = (short)((out->done < TOTAL ? POLLOUT : 0) | (in->done < TOTAL ? POLLIN : 0));
		if (poll(&p, 1, -1) < 0)
			fail("poll");
		if (p.revents & POLLOUT && out->done < TOTAL)
			give(out);
		if (p.revents & POLLIN && in->done < TOTAL)
			take(in);
		if (!(p.revents & (POLLIN | POLLOUT))) {
			fprintf(stderr, "poll says %#x\n", p.revents);
			exit(1);
		}
	}
	if (fcntl(out->fd, F_SETFL, 0))
		fail("fcntl");
}

/* finish ends the connection: this side has sent and received everything, and waits until the
 * peer says the same. */
static void finish(int fd)
{
	char b;
	if (shutdown(fd, SHUT_WR))
		fail("shutdown");
	ssize_t n = recv(fd, &b, 1, 0);
	if (n < 0)
		fail("recv at the end");
	if (n) {
		fprintf(stderr, "there are more bytes than the peer has sent\n");
		exit(1);
	}
	if (close(fd))
		fail("close");
}

int main(int argc, char **argv)
{
	static struct stream out, in;
	if (argc != 6)
		return 2;
	int server = !strcmp(argv[3], "server"), one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in sin = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[5]))};
	inet_pton(AF_INET, argv[4], &sin.sin_addr);
	if (fd < 0)
		fail("socket");
	if (server) {
		if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) || bind(fd, (struct sockaddr *)&sin, sizeof sin) || listen(fd, 5))
			fail("listen");
		int listener = fd;
		if ((fd = accept(listener, NULL, NULL)) < 0)
			fail("accept");
		close(listener);
	} else if (connect(fd, (struct sockaddr *)&sin, sizeof sin))
		fail("connect");
	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one))
		fail("setsockopt");
	out.fd = in.fd = fd;
	out.key = server ? 0x5eed : 0xc1e7;
	in.key = server ? 0xc1e7 : 0x5eed;
	out.random = strtoull(argv[2], NULL, 10) + (uint64_t)server;
	in.random = out.random ^ 0x1234567;
	if (!strcmp(argv[1], "turns"))
		in_turns(&out, &in, server);
	else if (!strcmp(argv[1], "poll"))
		by_poll(&out, &in);
	else if (!strcmp(argv[1], "echo") && server)
		echo(&in);
	else if (!strcmp(argv[1], "echo")) {
		in.key = out.key;
		by_poll(&out, &in);
	} else
		return 2;
	finish(fd);
	puts("ok");
	return 0;
}
