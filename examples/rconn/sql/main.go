// Command sql takes a database over RDMA: with database/sql and the driver of MySQL and MariaDB at one end, and a server that
// knows nothing of RDMA at the other.
//
//	sql serve 192.0.2.1:7306 /run/mysqld/mysqld.sock       (on the server's host)
//	sql query 192.0.2.1:7306 user:password test 'SELECT 1'
//
// The client has one line that is about RDMA. The server is left as it is: "serve" takes connections by RDMA and passes their
// bytes on to its unix socket, or, if the argument has a colon, to its TCP port.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/go-sql-driver/mysql"

	"github.com/verbena-rdma/verbena/rconn"
)

// The driver dials by RDMA where a data source has the network "rdma", as in "user:password@rdma(192.0.2.1:7306)/test".
func init() {
	mysql.RegisterDialContext("rdma", func(ctx context.Context, address string) (net.Conn, error) {
		return (&rconn.Dialer{}).DialContext(ctx, "rdma", address)
	})
}

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 3 && args[0] == "serve":
		err = serve(ctx, args[1], args[2])
	case len(args) == 5 && args[0] == "query":
		err = query(ctx, args[2]+"@rdma("+args[1]+")/"+args[3], args[4])
	default:
		fmt.Fprintln(os.Stderr, "usage: sql serve ADDR SOCKET | sql query ADDR USER:PASSWORD DATABASE QUERY")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sql:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, address, target string) error {
	l, err := rconn.Listen(ctx, address, nil)
	if err != nil {
		return err
	}
	fmt.Println("listening on", l.Addr())
	p := newProxy(l, targetNetwork(target), target)
	<-ctx.Done()
	return p.Close()
}

func targetNetwork(target string) string {
	if strings.Contains(target, ":") {
		return "tcp"
	}
	return "unix"
}

// query prints the rows that a query returns.
func query(ctx context.Context, source, text string) (err error) {
	db, err := sql.Open("mysql", source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	rows, err := db.QueryContext(ctx, text)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	names, err := rows.Columns()
	if err != nil {
		return err
	}
	row, into := make([]sql.NullString, len(names)), make([]any, len(names))
	for i := range row {
		into[i] = &row[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return err
		}
		var line []string
		for _, v := range row {
			line = append(line, v.String)
		}
		fmt.Println(strings.Join(line, "\t"))
	}
	return rows.Err()
}
