package main

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/rconn"
)

func TestMain(m *testing.M) {
	if os.Getenv("VERBENA_SQL_MAIN") != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// database starts MariaDB in a directory of its own, and returns its socket. It listens nowhere else, and asks for no passwords.
func database(t *testing.T) (socket string) {
	t.Helper()
	path := ""
	for _, name := range []string{"mariadbd", "/usr/sbin/mariadbd"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skip("mariadbd is not there: apt-get install mariadb-server-core")
	}
	dir, err := os.MkdirTemp("", "kv") // short: the name of a socket has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	socket = filepath.Join(dir, "socket")
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	args := []string{"--no-defaults", "--datadir=" + data, "--socket=" + socket, "--pid-file=" + filepath.Join(dir, "pid"),
		"--skip-networking", "--skip-grant-tables", "--innodb-buffer-pool-size=8M", "--innodb-log-file-size=4M", "--max-allowed-packet=16M"}
	if os.Getuid() == 0 {
		args = append(args, "--user=root")
	}
	var said bytes.Buffer
	c := exec.Command(path, args...)
	c.Stdout, c.Stderr = &said, &said
	// It ends with the test's process, also if that is killed.
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	t.Cleanup(func() {
		_ = c.Process.Kill() // fails if it has ended
		<-ended
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if s, err := net.Dial("unix", socket); err == nil {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			return socket
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("mariadbd has ended: %v\n%s", err, &said)
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("mariadbd does not listen\n%s", &said)
		}
	}
}

const idle = 2 // connections of a pool that nobody uses

// open returns a pool of connections to a database, which go through a proxy by RDMA.
func open(t *testing.T, at, name string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", "root@rdma("+at+")/"+name+"?maxAllowedPacket=16777216")
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxIdleConns(idle)
	t.Cleanup(func() {
		if err := db.Close(); err != nil && !errors.Is(err, driver.ErrBadConn) { // one that a proxy has ended, and nobody has used since
			t.Error(err)
		}
	})
	return db
}

func startProxy(t *testing.T, address, socket string) *proxy {
	t.Helper()
	l, err := rconn.Listen(t.Context(), address, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(l, targetNetwork(socket), socket)
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return p
}

// A real server behind the proxy: rows, long values, transactions of several clients at a time, a connection that is killed, a
// proxy that ends and another one, and the program itself.
func TestDatabase(t *testing.T) {
	socket := database(t)
	p := startProxy(t, "127.77.36.1:0", socket)
	at := p.l.Addr().String()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	do := func(db *sql.DB, text string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(ctx, text, args...); err != nil {
			t.Fatalf("%.60s: %v", text, err)
		}
	}
	do(open(t, at, ""), "CREATE DATABASE store")
	db := open(t, at, "store")
	do(db, "CREATE TABLE account (id INT PRIMARY KEY, money INT NOT NULL, note LONGBLOB) ENGINE=InnoDB")

	long := bytes.Repeat([]byte("verbena "), 1<<19) // 4 MiB
	for i := range 4 {
		do(db, "INSERT INTO account VALUES (?, 1000, ?)", i, long[:len(long)>>(4*i)])
	}
	for i := range 4 {
		var note []byte
		if err := db.QueryRowContext(ctx, "SELECT note FROM account WHERE id=?", i).Scan(&note); err != nil || !bytes.Equal(note, long[:len(long)>>(4*i)]) {
			t.Errorf("note %d: %d bytes, %v", i, len(note), err)
		}
	}

	// Money goes from account to account; none is lost.
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 0))
			for range 25 {
				from, to := r.IntN(4), r.IntN(4)
				if err := transfer(ctx, db, min(from, to), max(from, to), r.IntN(100)-50); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	sum := func() (n int, err error) {
		err = db.QueryRowContext(ctx, "SELECT SUM(money) FROM account").Scan(&n)
		return n, err
	}
	if n, err := sum(); err != nil || n != 4000 {
		t.Errorf("the sum is %d, %v; want 4000", n, err)
	}

	// The server ends a connection: the client hears of it, and the pool makes another one.
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var id int
	if err := conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id); err != nil {
		t.Fatal(err)
	}
	do(db, fmt.Sprintf("KILL %d", id))
	if err := conn.QueryRowContext(ctx, "SELECT 1").Scan(&id); err == nil {
		t.Error("a connection that the server has killed goes on")
	}
	_ = conn.Close() // it is broken
	if n, err := sum(); err != nil || n != 4000 {
		t.Errorf("after a killed connection the sum is %d, %v", n, err)
	}

	if err := p.Close(); err != nil {
		t.Error(err)
	}
	startProxy(t, at, socket)
	// The driver asks the kernel whether an idle connection has ended, which it can do for sockets only. Here the first query on
	// each of the pool's finds out.
	n, err := sum()
	for i := 0; i < idle && errors.Is(err, mysql.ErrInvalidConn); i++ {
		n, err = sum()
	}
	if err != nil || n != 4000 {
		t.Errorf("by the next proxy the sum is %d, %v", n, err)
	}

	c := exec.CommandContext(ctx, os.Args[0], "query", at, "root", "store", "SELECT id, money*0 FROM account ORDER BY id")
	c.Env = append(os.Environ(), "VERBENA_SQL_MAIN=1", "GORACE=atexit_sleep_ms=0")
	if out, err := c.CombinedOutput(); err != nil || string(out) != "0\t0\n1\t0\n2\t0\n3\t0\n" {
		t.Errorf("the program: %q, %v", out, err)
	}
}

// transfer moves money, in a transaction. The lower account is locked first, so that two transfers do not wait for each other.
func transfer(ctx context.Context, db *sql.DB, a, b, money int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	for _, step := range [][2]int{{a, -money}, {b, money}} {
		if _, err := tx.ExecContext(ctx, "UPDATE account SET money=money+? WHERE id=?", step[1], step[0]); err != nil {
			return errors.Join(err, tx.Rollback())
		}
	}
	return tx.Commit()
}

// A proxy whose target is not there closes connections, and the driver says so.
func TestNoDatabase(t *testing.T) {
	p := startProxy(t, "127.77.36.1:0", filepath.Join(t.TempDir(), "nothing"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := open(t, p.l.Addr().String(), "").PingContext(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("a ping without a database: %v", err)
	}
}
