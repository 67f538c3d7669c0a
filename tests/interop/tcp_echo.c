/* An ordinary TCP program, with no word of RDMA: a server that echoes, or a client of one.
 *
 *   tcp_echo server ADDRESS PORT           accept one connection and echo until the end of stream
 *   tcp_echo client ADDRESS PORT < FILE    send FILE, half-close, then show what comes back
 *   tcp_echo talk ADDRESS PORT < FILE      after each piece of FILE wait until it has come back
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char buffer[40000];

static void check(int ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(2);
}

static void write_all(int fd, ssize_t size)
{
    for (ssize_t done = 0; done < size;) {
        ssize_t n = write(fd, buffer + done, size - done);
        check(n > 0, "write");
        done += n;
    }
}

static void serve(int listener)
{
    ssize_t n, total = 0;
    check(listen(listener, 4) == 0, "listen");
    fprintf(stderr, "listening\n");
    int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    fprintf(stderr, "accepted\n");
    while ((n = read(fd, buffer, sizeof(buffer))) > 0) {
        write_all(fd, n);
        total += n;
    }
    check(n == 0, "read");
    fprintf(stderr, "end of stream after %zd bytes\n", total);
    check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    close(fd);
}

static void call(int fd, int talk)
{
    ssize_t n;
    while ((n = read(0, buffer, sizeof(buffer))) > 0) {
        write_all(fd, n);
        for (ssize_t left = talk ? n : 0; left > 0; left -= n) {
            n = read(fd, buffer, left);
            check(n > 0, "read");
            write_all(1, n);
        }
    }
    check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    while ((n = read(fd, buffer, sizeof(buffer))) > 0)
        write_all(1, n);
    check(n == 0, "read");
    fprintf(stderr, "end of stream\n");
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    if (argc != 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
        return 1;
    at.sin_port = htons(atoi(argv[3]));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(fd >= 0, "socket");
    if (strcmp(argv[1], "server") == 0) {
        check(bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "bind");
        serve(fd);
    } else {
        check(connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "connect");
        fprintf(stderr, "connected\n");
        call(fd, strcmp(argv[1], "talk") == 0);
    }
    close(fd);
    return 0;
}
